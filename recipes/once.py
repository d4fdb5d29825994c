"""A directory that is either complete or not there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


def make_once(directory: Path, make: Callable[[Path], None], report: Callable[[str], None] = print) -> Path:
    """Lets `make` fill `directory`, unless that has been done before.

    `make` works under another name beside it, renamed when it returns: an interrupted or failed run leaves nothing
    under the name that is looked for.
    """
    if directory.exists():
        report(f"assets: using {directory}")
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = directory.with_name(f".{directory.name}-{uuid4().hex[:8]}")
    unfinished.mkdir()
    try:
        make(unfinished)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    report(f"assets: made {directory}")
    return directory
