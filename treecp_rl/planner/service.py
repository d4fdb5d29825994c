"""PlannerService: a Ray actor beside the trainer that solves requests ahead of the ranks that fetch their plans.

The trainer submits a step's requests as soon as its lengths are known; ranks fetch by key when they need a plan, and
solve it themselves where it is not there: a plan depends on nothing but its request. Importing this needs no Ray.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from treecp_rl.errors import PlanError
from treecp_rl.planner.request import PlanRequest
from treecp_rl.planner.schedule_batch import BatchPlan

SERVICE_NAME = "treecp_planner"
MOST_PLANS = 4096
"""Kept by the service; the oldest are dropped first."""
FETCH_TIMEOUT_SECONDS = 2.0
"""Longer than a plan takes to solve, shorter than anyone would wait for one."""

Source = Literal["fetched", "fallback", "alone"]
"""Where a rank's plan came from: the service; the rank, because the service did not answer or did not know it (a new
one knows nothing); the rank, because there is no service."""
SOURCES: tuple[Source, ...] = get_args(Source)


@dataclass(frozen=True)
class PlanEvent:
    """When a plan was last asked for, known, and used since, seconds since the epoch."""

    key: str
    num_trees: int
    submitted_at: float
    solved_at: float
    first_fetched_at: float | None
    """None: by nobody yet."""


class PlannerService:
    """Plans by key. Calls are served one after another: a fetch that overtakes nothing finds what was submitted."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, BatchPlan | PlanError] = OrderedDict()
        self._events: OrderedDict[str, PlanEvent] = OrderedDict()

    def submit(self, requests: Sequence[PlanRequest], submitted_at: float) -> None:
        """Solve requests whose plans are not known yet."""
        for request in requests:
            key = request.key
            if key not in self._plans:
                self._plans[key] = _solved(request)
            self._events[key] = PlanEvent(key, len(request.trees), submitted_at, time.time(), None)
            while len(self._plans) > MOST_PLANS:
                dropped, _ = self._plans.popitem(last=False)
                del self._events[dropped]

    def fetch(self, key: str) -> BatchPlan | PlanError | None:
        """The plan of a request, the error that it ended with, or None if nobody submitted it."""
        event = self._events.get(key)
        if event is not None and event.first_fetched_at is None:
            self._events[key] = replace(event, first_fetched_at=time.time())
        return self._plans.get(key)

    def events(self) -> tuple[PlanEvent, ...]:
        """Of all plans that are kept, oldest first."""
        return tuple(self._events.values())


def _solved(request: PlanRequest) -> BatchPlan | PlanError:
    """An error is kept like a plan: the rank that needs the plan reports it, where the step is."""
    try:
        return request.solve()
    except PlanError as error:
        return error


def lead_seconds(events: Sequence[PlanEvent], keys: Collection[str]) -> float | None:
    """How long before its first use the latest of these plans was solved; below 0: a rank had to wait. None: none of
    them was used."""
    leads = [
        event.first_fetched_at - event.solved_at
        for event in events
        if event.key in keys and event.first_fetched_at is not None
    ]
    return min(leads, default=None)


def start_service() -> Any:
    """The job's planner actor, named ``SERVICE_NAME``; Ray restarts it if it dies, without its plans."""
    import ray

    actor = ray.remote(PlannerService).options(
        name=SERVICE_NAME, num_cpus=0, max_restarts=-1, get_if_exists=True
    )
    return actor.remote()


class PlannerClient:
    """A process's view of the job's service, and where its plans came from since they were last counted."""

    def __init__(self, timeout_seconds: float = FETCH_TIMEOUT_SECONDS) -> None:
        self.timeout_seconds = timeout_seconds
        self._service: Any = None
        self._has_service: bool | None = None
        """None: nobody has looked yet."""
        self._counts = dict.fromkeys(SOURCES, 0)
        self._seconds = 0.0

    def find(self, request: PlanRequest) -> BatchPlan:
        """The request's plan: the service's, or solved here.

        Raises:
            PlanError: there is none.
        """
        started = time.perf_counter()
        answer, source = self._ask(request.key)
        self._counts[source] += 1
        try:
            if isinstance(answer, PlanError):
                raise answer
            return request.solve() if answer is None else answer
        finally:
            self._seconds += time.perf_counter() - started

    def take_counts(self) -> tuple[dict[Source, int], float]:
        """Plans by source, and the seconds that this process waited for them or solved them, since the last call."""
        taken = dict(self._counts), self._seconds
        self._counts, self._seconds = dict.fromkeys(SOURCES, 0), 0.0
        return taken

    def _ask(self, key: str) -> tuple[BatchPlan | PlanError | None, Source]:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        if self._has_service is None:
            self._has_service = ray.is_initialized() and _finds_service()
        if not self._has_service:
            return None, "alone"
        try:
            if self._service is None:
                self._service = ray.get_actor(SERVICE_NAME)
            answer = ray.get(self._service.fetch.remote(key), timeout=self.timeout_seconds)
        except (RayActorError, GetTimeoutError, ValueError):
            # Dead, restarting, busy or gone; its successor may answer to the name.
            self._service = None
            return None, "fallback"
        return answer, "fallback" if answer is None else "fetched"


def _finds_service() -> bool:
    import ray

    try:
        ray.get_actor(SERVICE_NAME)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1)
def planner_client() -> PlannerClient:
    """This process's client."""
    return PlannerClient()
