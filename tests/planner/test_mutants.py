"""Proves that the checker refuses schedules broken in one place, whatever the form of the pass.

A mutant that is accepted must be exact when it is played token by token (``simulate``): nothing passes in silence.
"""

import random
from dataclasses import replace

import pytest

from tests.planner.shapes import KINDS, decision, trees
from tests.planner.simulate import is_exact
from treecp_rl.attention.program import compile_program
from treecp_rl.errors import PlanError
from treecp_rl.plan import Segment, Stage
from treecp_rl.planner.check import check
from treecp_rl.planner.lower import lower, lower_local

SPLIT_KINDS = tuple(kind for kind in KINDS if kind != "dcp_fused")
SMALL = trees((130, [40, 3, 64]), (9, [140, 5]))
"""Long enough that prompts are cut zigzag over 4 ranks, and small enough to play."""


def lowered(kind, form):
    """A schedule of ``SMALL`` in one of the forms a pass takes."""
    decisions = [decision(kind, 4), decision("gather", 2, first_rank=1)]
    options = {
        "fused": {},
        "replay": {"resident_trees": (0,)},
        "resend": {"resend": True},
        "in turn": {"streaming": False},
        "replay, resend": {"resident_trees": (0, 1), "resend": True},
    }[form]
    return lower(SMALL, decisions, 4, **options)


FORMS = [
    (kind, form)
    for form in ("fused", "replay", "resend", "in turn", "replay, resend")
    for kind in (SPLIT_KINDS if "replay" in form else KINDS)
]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_every_form_is_accepted_and_exact(kind, form):
    schedule = lowered(kind, form)
    check(schedule, SMALL)
    assert is_exact(schedule, SMALL)
    for rank in range(schedule.world_size):
        compile_program(schedule, rank)


def tile_mutants(tile, world_size):
    """Other tiles, or none, in the place of one."""
    yield "dropped", []
    yield "doubled", [tile, tile]
    yield "on another rank", [tile._replace(rank=(tile.rank + 1) % world_size)]
    yield "of another diagonal", [tile._replace(causal=not tile.causal)]
    yield "without its last key", [tile._replace(key_stop=tile.key_stop - 1)]
    yield "without its last query", [tile._replace(query_stop=tile.query_stop - 1)]
    yield "with a key more", [tile._replace(key_stop=tile.key_stop + 1)]
    yield "with an earlier key", [tile._replace(key_start=tile.key_start - 1)]
    yield "of the next part of the heads", [_next_part(tile)]
    yield "of half of its heads", [_half(tile)]


def move_mutants(move, world_size):
    """Other moves, or none, in the place of one."""
    yield "dropped", []
    yield "doubled", [move, move]
    yield "from another rank", [move._replace(src=(move.src + 1) % world_size)]
    yield "to another rank", [move._replace(dst=(move.dst + 1) % world_size)]
    yield "to where it is", [move._replace(dst=move.src)]
    yield "shortened", [move._replace(stop=move.stop - 1)]
    yield "lengthened", [move._replace(stop=move.stop + 1)]
    yield "of the next part of the heads", [_next_part(move)]
    yield "of half of its heads", [_half(move)]


def _next_part(item):
    if item.num_head_parts == 1:
        return item._replace(head_part=1)
    return item._replace(head_part=(item.head_part + 1) % item.num_head_parts)


def _half(item):
    return item._replace(head_part=2 * item.head_part, num_head_parts=2 * item.num_head_parts)


def mutants(schedule, rng):
    """(what is wrong, schedule) with one tile, one move, or one residence changed."""
    stages = schedule.stages

    def changed(index, stage):
        return replace(schedule, stages=(*stages[:index], stage, *stages[index + 1 :]))

    index = rng.choice([i for i, stage in enumerate(stages) if stage.tiles])
    moves, tiles = stages[index].moves, stages[index].tiles
    at = rng.randrange(len(tiles))
    for what, others in tile_mutants(tiles[at], schedule.world_size):
        yield f"{tiles[at]} {what}", changed(index, Stage(moves, (*tiles[:at], *others, *tiles[at + 1 :])))
    for other in range(len(stages)):
        if other != index:
            moved = changed(index, Stage(moves, (*tiles[:at], *tiles[at + 1 :])))
            there = Stage(stages[other].moves, (*stages[other].tiles, tiles[at]))
            yield (
                f"{tiles[at]} in stage {other}, not {index}",
                replace(moved, stages=(*moved.stages[:other], there, *moved.stages[other + 1 :])),
            )
    index = rng.choice([i for i, stage in enumerate(stages) if stage.moves])
    moves, tiles = stages[index].moves, stages[index].tiles
    at = rng.randrange(len(moves))
    for what, others in move_mutants(moves[at], schedule.world_size):
        yield f"{moves[at]} {what}", changed(index, Stage((*moves[:at], *others, *moves[at + 1 :]), tiles))
    late = Stage((*stages[-1].moves, moves[at]), stages[-1].tiles)
    if index < len(stages) - 1:
        gone = changed(index, Stage((*moves[:at], *moves[at + 1 :]), tiles))
        yield f"{moves[at]} in the last stage", replace(gone, stages=(*gone.stages[:-1], late))
    for span in schedule.resident:
        others = tuple(other for other in schedule.resident if other != span)
        yield f"{span} not resident", replace(schedule, resident=others)
        yield f"half of {span} resident", replace(schedule, resident=((span[0], span[1] - 1), *others))
    segment = rng.choice(schedule.segments)
    elsewhere = replace(segment, rank=(segment.rank + 1) % schedule.world_size)
    moved_home = tuple(elsewhere if other == segment else other for other in schedule.segments)
    yield f"{segment} on another rank", replace(schedule, segments=moved_home)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_a_schedule_broken_in_one_place_is_refused_or_exact(kind, form, seed):
    schedule = lowered(kind, form)
    refused = 0
    for what, broken in mutants(schedule, random.Random(f"{kind} {form} {seed}")):
        try:
            check(broken, SMALL)
        except PlanError:
            refused += 1
            continue
        assert is_exact(broken, SMALL), f"{what} was accepted, and computes something else"
    assert refused >= 20


@pytest.mark.parametrize("kind", SPLIT_KINDS)
def test_a_resident_query_that_is_computed_again_is_refused(kind):
    schedule = lowered(kind, "replay")
    root = next(segment for segment in schedule.segments if segment.start == 0)
    again = (
        lowered(kind, "fused")
        .stages[0]
        .tiles[0]
        ._replace(
            rank=root.rank, query_start=0, query_stop=root.stop, key_start=0, key_stop=root.stop, causal=True
        )
    )
    first = schedule.stages[0]
    broken = replace(schedule, stages=(Stage(first.moves, (*first.tiles, again)), *schedule.stages[1:]))
    with pytest.raises(PlanError, match="which an earlier pass did"):
        check(broken, SMALL)


@pytest.mark.parametrize("kind", ("gather", "ring", "tree_move_kv", "heads"))
def test_a_resident_key_that_is_read_without_a_move_is_refused(kind):
    schedule = lowered(kind, "replay")
    stages = tuple(
        Stage(tuple(m for m in stage.moves if m.kind != "kv" or m.stop > 130), stage.tiles)
        for stage in schedule.stages
    )
    with pytest.raises(PlanError, match="needs kv that its rank has not received"):
        check(replace(schedule, stages=stages), SMALL)


def test_keys_in_two_buffers_are_refused():
    """A prompt's resident tokens and a response's adjoin on the axis, but not in a rank's memory."""
    nodes = trees((8, [8]))
    schedule = lower_local(nodes, roots_are_resident=True)
    check(schedule, nodes)
    (stage,) = schedule.stages
    causal = next(tile for tile in stage.tiles if tile.causal)
    first, second = causal._replace(query_stop=12, key_stop=12), causal._replace(query_start=12, key_start=12)
    both = second._replace(key_start=0, key_stop=12, causal=False)
    root = first._replace(key_start=0, key_stop=8, causal=False)
    with pytest.raises(PlanError, match="in one buffer"):
        check(replace(schedule, stages=(Stage((), (first, second, root, both)),)), nodes)
    with pytest.raises(PlanError, match="two buffers"):
        check(replace(schedule, segments=(Segment(0, 0, 16),)), nodes)


def test_a_response_cannot_be_resident():
    """Its tiles could otherwise be dropped without a trace."""
    schedule = lowered("gather", "replay")
    with pytest.raises(PlanError, match="only a whole root can be"):
        check(replace(schedule, resident=(*schedule.resident, (130, 170))), SMALL)


def test_a_tile_that_reads_another_stage_is_refused_only_where_moves_are_sent_again():
    """What is kept may be read later; what is sent again in backward is there for its own stage's tiles alone."""
    for form, is_right in (("fused", True), ("resend", False)):
        schedule = lowered("gather", form)
        first, second = schedule.stages
        arrived = {move.start for move in second.moves}
        late = next(tile for tile in second.tiles if tile.key_start in arrived)
        rest = tuple(tile for tile in second.tiles if tile is not late)
        stages = (first, Stage(second.moves, rest), Stage((), (late,)))
        moved = replace(schedule, stages=stages)
        if is_right:
            check(moved, SMALL)
        else:
            with pytest.raises(PlanError, match="there for one stage alone"):
                check(moved, SMALL)


@pytest.mark.parametrize("kind", ["kv", "q", "state"])
def test_a_part_of_the_heads_that_goes_astray_is_refused(kind):
    schedule = lowered("heads", "fused")
    index, move = next(
        (i, move) for i, stage in enumerate(schedule.stages) for move in stage.moves if move.kind == kind
    )
    assert move.num_head_parts == 2
    stage = schedule.stages[index]
    wrong = tuple(m._replace(head_part=1 - m.head_part) if m is move else m for m in stage.moves)
    stages = (*schedule.stages[:index], Stage(wrong, stage.tiles), *schedule.stages[index + 1 :])
    with pytest.raises(PlanError):
        check(replace(schedule, stages=stages), SMALL)


def test_a_part_missing_on_one_tile_is_refused():
    schedule = lowered("heads", "fused")
    stage = schedule.stages[1]
    tile = next(tile for tile in stage.tiles if tile.num_head_parts == 2)
    rest = tuple(other for other in stage.tiles if other is not tile)
    stages = (schedule.stages[0], Stage(stage.moves, rest), *schedule.stages[2:])
    with pytest.raises(PlanError, match=r"of their \d+ pairs"):
        check(replace(schedule, stages=stages), SMALL)
