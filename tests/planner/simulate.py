"""The definition of a right schedule, played token by token: the yardstick for what the checker accepts."""

from collections import Counter
from math import lcm

from treecp_rl.planner.check import STATE_DELAY


def allowed_pairs(nodes, resident):
    """(query, key) pairs of the trees, without queries of resident spans."""
    pairs = set()
    for node in nodes:
        if (node.start, node.stop) in resident:
            continue
        ancestors, parent = [], node.parent
        while parent >= 0:
            ancestors += range(nodes[parent].start, nodes[parent].stop)
            parent = nodes[parent].parent
        for query in range(node.start, node.stop):
            pairs.update((query, key) for key in ancestors)
            pairs.update((query, key) for key in range(node.start, query + 1))
    return pairs


def is_exact(schedule, nodes):
    """Whether running the schedule gives every query every one of its keys, once, from operands that are there."""
    owner = {}
    for segment in schedule.segments:
        for token in range(segment.start, segment.stop):
            if token in owner:
                return False
            owner[token] = segment.rank
    items = [item for stage in schedule.stages for item in (*stage.tiles, *stage.moves)]
    parts = lcm(*(item.num_head_parts for item in items))
    return set(owner) == set(range(schedule.num_tokens)) and all(
        _part_is_exact(schedule, nodes, owner, part, parts) for part in range(parts)
    )


def _part_is_exact(schedule, nodes, owner, part, parts):
    def here(item):
        return part * item.num_head_parts // parts == item.head_part

    came = {}
    """(kind, rank, token) -> stage in which it arrived."""
    home = Counter()
    """(query, key) -> times it is part of the owner's result."""
    away = {}
    """(rank, query) -> keys and the last stage in which they were computed there."""
    for index, stage in enumerate(schedule.stages):
        for move in filter(here, stage.moves):
            for token in range(move.start, move.stop):
                if move.kind == "state":
                    keys, last = away.pop((move.src, token), (None, 0))
                    if keys is None or owner[token] != move.dst or index < last + STATE_DELAY:
                        return False
                    home.update((token, key) for key in keys)
                elif owner.get(token) != move.src or (move.kind, move.dst, token) in came:
                    return False
                else:
                    came[move.kind, move.dst, token] = index
        for tile in filter(here, stage.tiles):
            queries, keys = range(tile.query_start, tile.query_stop), range(tile.key_start, tile.key_stop)
            for kind, tokens in (("q", queries), ("kv", keys)):
                missing = [token for token in tokens if owner.get(token) != tile.rank]
                stages = {came.get((kind, tile.rank, token)) for token in missing}
                if None in stages or (schedule.resend and stages - {index}):
                    return False
            for query in queries:
                seen = [key for key in keys if not tile.causal or key <= query]
                if owner[query] == tile.rank:
                    home.update((query, key) for key in seen)
                else:
                    before = away.get((tile.rank, query), ([], 0))[0]
                    away[tile.rank, query] = ([*before, *seen], index)
    return not away and home == Counter(allowed_pairs(nodes, set(schedule.resident)))
