"""The service's books, and a client with no service, a living one, and one that was killed."""

import time

import pytest

from tests.planner.killing import kill_service
from treecp_rl.errors import PlanError
from treecp_rl.planner import service
from treecp_rl.planner.estimates import estimate_profile
from treecp_rl.planner.forms import RunOptions
from treecp_rl.planner.request import arrange
from treecp_rl.planner.search import TreeLengths

PROFILE = estimate_profile("h100", "Qwen2.5-7B")


def request_of(prompt, **options):
    return arrange([TreeLengths(prompt, (5, 7))], 4, PROFILE, RunOptions(**options)).request


def test_service_solves_once_and_tells_when(monkeypatch):
    books = service.PlannerService()
    known, unknown = request_of(100), request_of(101)
    books.submit([known, known], submitted_at=1.0)
    assert books.fetch(known.key) is not None
    books.submit([known], submitted_at=2.0)
    assert books.events()[0].first_fetched_at is None
    assert books.fetch(unknown.key) is None
    assert books.fetch(known.key).digest == known.solve().digest
    (event,) = books.events()
    assert (event.key, event.submitted_at, event.num_trees) == (known.key, 2.0, 1)
    lead = event.first_fetched_at - event.solved_at
    assert service.lead_seconds(books.events(), {known.key}) == lead >= 0
    assert service.lead_seconds(books.events(), {unknown.key}) is None
    monkeypatch.setattr(service, "MOST_PLANS", 2)
    books.submit([request_of(prompt) for prompt in (1, 2)], submitted_at=3.0)
    assert books.fetch(known.key) is None
    assert len(books.events()) == 2


def test_what_cannot_be_planned_is_reported_to_the_rank_that_asks():
    impossible = request_of(100, tokens_per_rank=3)
    books = service.PlannerService()
    books.submit([impossible, request_of(9)], submitted_at=1.0)
    assert isinstance(books.fetch(impossible.key), PlanError)
    assert books.fetch(request_of(9).key) is not None
    with pytest.raises(PlanError, match="raise tokens_per_rank or the ranks"):
        service.PlannerClient().find(impossible)


def test_without_a_service_plans_are_solved_here():
    client = service.PlannerClient()
    assert client.find(request_of(100)).digest == request_of(100).solve().digest
    counts, seconds = client.take_counts()
    assert counts == {"fetched": 0, "fallback": 0, "alone": 1}
    assert seconds > 0
    assert client.take_counts() == (dict.fromkeys(counts, 0), 0.0)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_service_loses_nothing_and_comes_back():
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        actor, client = service.start_service(), service.PlannerClient()
        request = request_of(100)
        ray.get(actor.submit.remote([request], time.time()))
        expected = request.solve().digest
        assert client.find(request).digest == expected
        kill_service()
        assert client.find(request).digest == expected
        assert client.take_counts()[0] == {"fetched": 1, "fallback": 1, "alone": 0}

        deadline, seen = time.monotonic() + 60, {}
        while not seen.get("fetched") and time.monotonic() < deadline:
            ray.get_actor(service.SERVICE_NAME).submit.remote([request], time.time())
            time.sleep(0.5)
            assert client.find(request).digest == expected
            seen = client.take_counts()[0]
        assert seen["fetched"] == 1
    finally:
        ray.shutdown()
