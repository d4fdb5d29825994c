"""chrome trace of one rank's step -> how much of its communication ran under computation.

Read from a ``torch.profiler`` trace: gloo records each all-to-all on its own threads, from the moment a thread takes
it up until its last byte is there; the executor records ``treecp::tiles`` and ``treecp::wait`` ranges.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ALL_TO_ALL, TILES, WAIT = "gloo:all_to_all", "treecp::tiles", "treecp::wait"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds of one rank's step during which bytes of attention were under way.

    Counted are all-to-alls, which only attention uses: gloo records no end of a point-to-point send, and FSDP2's
    gathers are not attention's. The time for which a rank waits for a slower one to enter counts as under way, too.
    """

    num_exchanges: int
    communication_seconds: float
    """Of the union of all all-to-alls: two at a time count once."""
    hidden_seconds: float
    """The part of it during which the rank computed tiles."""
    waited_seconds: float
    """The part of it during which the rank did nothing but wait for it."""

    @property
    def hidden_fraction(self) -> float | None:
        """Hidden part of communication; None where there was none."""
        return self.hidden_seconds / self.communication_seconds if self.communication_seconds else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hidden_fraction": self.hidden_fraction}


def overlap_of(trace: dict[str, Any]) -> Overlap:
    """Measure one rank's trace, as ``export_chrome_trace`` writes it (times in microseconds)."""
    found: dict[str, list[Interval]] = {ALL_TO_ALL: [], TILES: [], WAIT: []}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("name") in found:
            found[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    under_way = _union(found[ALL_TO_ALL])
    return Overlap(
        num_exchanges=len(found[ALL_TO_ALL]),
        communication_seconds=_length(under_way) / 1e6,
        hidden_seconds=_shared(under_way, _union(found[TILES])) / 1e6,
        waited_seconds=_shared(under_way, _union(found[WAIT])) / 1e6,
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as ascending, disjoint intervals."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def _shared(ones: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Time that lies in both of two unions."""
    total, index = 0.0, 0
    for start, stop in ones:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < stop:
            total += min(stop, others[at][1]) - max(start, others[at][0])
            at += 1
    return total
