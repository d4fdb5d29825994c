"""The only package that imports verl. Its classes are loaded on first use.

verl imports this package, through its plugin, in the middle of its own import and in every process, so
nothing may be imported here.
"""

_HOMES = {
    "TreeCPActorRolloutRefWorker": "worker",
    "TreeCPTrainingWorker": "worker",
    "TreeCPEngine": "engine",
    "TreeCPTrainer": "trainer",
    "TreeCPOptions": "options",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
