"""`treecp-rl plan` and `treecp-rl bench plan`: lengths -> plan, and the time it takes to find it."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from treecp_rl.errors import ConfigError
from treecp_rl.planner.estimates import estimate_profile
from treecp_rl.planner.explain import all_figures, as_json, describe, picture
from treecp_rl.planner.forms import RunOptions, Space, powers_of_two
from treecp_rl.planner.lengths import read_lengths
from treecp_rl.planner.polish import plan_for_run
from treecp_rl.planner.profile import ClusterProfile, load_profile
from treecp_rl.planner.schedule_batch import BatchPlan, Effort, Policy, plan_batch
from treecp_rl.planner.search import TreeChoice, TreeLengths, TreeSearch
from treecp_rl.simulator.methods import Alternative, Cluster, alternatives, one_by_one
from treecp_rl.simulator.workloads import draw_batch


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked to be planned."""

    lengths: str
    ranks: int
    profile: str = "h100"
    model: str | None = None
    """Estimate for another model of ``planner.estimates`` on the profile's hardware."""
    policy: Policy = "auto"
    degree: int | None = None
    effort: Effort | Literal["run"] = "run"
    """``run``: whatever a run does with such a batch."""
    tokens_per_rank: int | None = None
    checkpointing: bool = True
    forward_only: bool = False
    compare: bool = False
    picture: str | None = None
    characters_per_token: float | None = None


@dataclass(frozen=True)
class PlanAnswer:
    """The plan, as data and as text."""

    record: dict[str, Any]
    text: str


def answer(request: PlanRequest) -> PlanAnswer:
    """Plan what was asked, and write the picture.

    Raises:
        BatchError, ConfigError, PlanError: with the file, the term or the tree.
    """
    trees = read_lengths(request.lengths, request.characters_per_token)
    profile = profile_of(request.profile, request.model)
    options = RunOptions(request.checkpointing, not request.forward_only, request.tokens_per_rank)
    started = time.perf_counter()
    plan = _solve(request, trees, profile, options)
    solve_seconds = time.perf_counter() - started
    figures = all_figures(plan, trees, profile, options)
    record = as_json(plan, figures) | {"solve_seconds": solve_seconds}
    text = describe(plan, figures, profile, solve_seconds)
    if request.compare:
        found = alternatives(trees, Cluster(profile, request.ranks, options))
        record["alternatives"] = [asdict(one) for one in found]
        text += "\n\n" + _compared(plan, found)
    if request.picture is not None:
        Path(request.picture).write_text(picture(plan, figures))
        text += f"\n\npicture: {request.picture}"
    return PlanAnswer(record, text)


def _solve(
    request: PlanRequest, trees: Sequence[TreeLengths], profile: ClusterProfile, options: RunOptions
) -> BatchPlan:
    effort, policy, degree = request.effort, request.policy, request.degree
    if effort == "run":
        if policy == "auto" and degree is None:
            return plan_for_run(trees, request.ranks, profile, options)
        effort = "fast"
    elif policy != "auto":
        raise ConfigError(f"--effort {effort} belongs to policy auto; leave it out with policy {policy}")
    return plan_batch(trees, request.ranks, profile, options, policy, degree, effort)


def profile_of(name: str, model: str | None) -> ClusterProfile:
    """A profile by name or file, or the estimate of a model on named hardware."""
    return load_profile(name) if model is None else estimate_profile(name, model)


def _compared(plan: BatchPlan, found: Sequence[Alternative]) -> str:
    lines = [f"{'alternative':<30} {'seconds':>9} {'of this':>8} {'passes':>7}   how"]
    for one in found:
        seconds = "does not fit" if one.seconds is None else f"{one.seconds:.3f}"
        ratio = "" if one.seconds is None else f"{one.seconds / plan.predicted_seconds:.3f}"
        lines.append(f"{one.name:<30} {seconds:>9} {ratio:>8} {one.num_passes or '':>7}   {one.note}")
    return "\n".join(lines)


BATCHES = ((64, 8, 64), (512, 8, 64), (512, 16, 512), (4096, 8, 1024))
"""(trees, responses of each, ranks)"""
TREE_BLOCKS = (16, 64, 256, 1024, 8192)
"""Blocks of 512 tokens of a tree, half of them prompt."""
BLOCK_TOKENS = 512
SPACES: tuple[Space, ...] = ("augtree", "full")
TREE_DEGREES = powers_of_two(128)


@dataclass(frozen=True)
class BenchOptions:
    """What ``bench plan`` measures."""

    profile: str = "h100"
    repeats: int = 7
    seeds: int = 3
    peers: bool = False
    """Also the other policies, on batches of at most 64 ranks and 64 trees."""


def measure(options: BenchOptions, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Time to plan trees and batches, and how good the plans are; caches are warm."""
    profile = load_profile(options.profile)
    load_before = os.getloadavg()[0]
    cases, fixed_groups = [], []
    for group_size in (8, 16, 64):
        for case in _tree_cases(profile, group_size, options.repeats):
            cases.append(case)
            progress(_line(case))
    for num_trees, group_size, ranks in BATCHES:
        for workload in ("long", "reasoning", "mixed"):
            for seed in range(options.seeds):
                found = _batch_cases(profile, workload, num_trees, group_size, ranks, seed, options)
                cases += found
                progress(_line(cases[-1]))
                if len(found) > 1:
                    fixed_groups += _fixed_groups(profile, found[0], seed)
    return {
        "profile": profile.name,
        "profile_kind": profile.kind,
        "repeats": options.repeats,
        # Set before numpy loads, or BLAS takes a thread a core.
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS"),
        "cpu_count": os.cpu_count(),
        "load_average_before_and_after": [load_before, os.getloadavg()[0]],
        "fixed_groups": fixed_groups,
        "cases": cases,
    }


def _tree_cases(profile: ClusterProfile, group_size: int, repeats: int) -> list[dict[str, Any]]:
    """Trees of each size in each space, each planned once, after some for warming up; in turns, because a case takes
    milliseconds, as long as others on a machine may disturb."""
    asked = [(blocks, space) for blocks in TREE_BLOCKS for space in SPACES]
    searches = [TreeSearch(profile, TREE_DEGREES, RunOptions(), space) for _, space in asked]
    seconds: list[list[float]] = [[] for _ in asked]
    choices: list[TreeChoice] = []
    for turn in range(1 + repeats):
        choices.clear()
        for (blocks, _), search, of_case in zip(asked, searches, seconds, strict=True):
            trees = [
                _sized(blocks * BLOCK_TOKENS, group_size, seed) for seed in range(10 * turn, 10 * turn + 10)
            ]
            for tree in trees:
                started = time.perf_counter()
                choice = search(tree)
                of_case.append(time.perf_counter() - started)
            choices.append(choice)
    return [
        {
            "trees": 1,
            "group_size": group_size,
            "ranks": TREE_DEGREES[-1],
            "policy": space,
            "blocks": blocks,
            "candidates": choice.num_candidates,
            "solve_ms_median": statistics.median(of_case[10:]) * 1e3,
            "solve_ms_least": min(of_case) * 1e3,
            "gap": choice.lanes_gap,
            "predicted_seconds": choice.seconds,
        }
        for (blocks, space), of_case, choice in zip(asked, seconds, choices, strict=True)
    ]


def _sized(num_tokens: int, group_size: int, seed: int) -> TreeLengths:
    """Half prompt, half responses, which are a reasoning group's, scaled."""
    (tree,) = draw_batch("reasoning", 1, group_size, seed)
    scale = num_tokens / 2 / sum(tree.responses)
    return TreeLengths(num_tokens // 2, tuple(max(1, round(one * scale)) for one in tree.responses))


def _batch_cases(
    profile: ClusterProfile,
    workload: str,
    num_trees: int,
    group_size: int,
    ranks: int,
    seed: int,
    options: BenchOptions,
) -> list[dict[str, Any]]:
    trees = draw_batch(workload, num_trees, group_size, seed)
    is_small = num_trees * ranks <= 64 * 64
    asked: list[tuple[Policy, int | None, Effort]] = [("auto", None, "fast")]
    if options.peers and is_small:
        asked += [("auto", None, "thorough"), ("nsp", None, "fast"), ("disjoint", None, "fast")]
        asked += [("static", min(8, ranks), "fast")]
    cases = []
    for policy, degree, effort in asked:
        seconds, cpu, repeats = [], [], 1 + (options.repeats if effort == "fast" and policy == "auto" else 1)
        for _ in range(repeats):
            started, cpu_started = time.perf_counter(), time.process_time()
            plan = plan_batch(trees, ranks, profile, RunOptions(), policy, degree, effort)
            seconds.append(time.perf_counter() - started)
            cpu.append(time.process_time() - cpu_started)
        cases.append(
            {
                "trees": num_trees,
                "group_size": group_size,
                "ranks": ranks,
                "policy": policy + (f"({degree})" if degree else "") + ("+" if effort == "thorough" else ""),
                "workload": workload,
                "seed": seed,
                "solve_ms_median": statistics.median(seconds[1:]) * 1e3,
                "solve_ms_least": min(seconds) * 1e3,
                "solve_cpu_ms_median": statistics.median(cpu[1:]) * 1e3,
                "gap": plan.gap,
                "predicted_seconds": plan.predicted_seconds,
                "passes": len(plan.passes),
            }
        )
    return cases


def _fixed_groups(profile: ClusterProfile, auto: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Groups of 8 ranks in which each tree is a call of its own, as AugTree runs it and with our fused kinds."""
    trees = draw_batch(auto["workload"], auto["trees"], auto["group_size"], seed)
    degree = min(8, auto["ranks"])
    found = []
    for kinds, shared_passes in (("ours", True), ("AugTree's", False)):
        seconds = one_by_one(
            trees, Cluster(profile, auto["ranks"], RunOptions()), degree, shared_passes=shared_passes
        )
        what = {name: auto[name] for name in ("trees", "group_size", "ranks", "workload", "seed")}
        over = seconds / auto["predicted_seconds"]
        found.append(
            what | {"degree": degree, "kinds": kinds, "predicted_seconds": seconds, "over_auto": over}
        )
    return found


def _line(case: dict[str, Any]) -> str:
    what = case.get("workload") or f"{case['blocks']} blocks"
    return (
        f"{case['trees']:>5} trees of {case['group_size']:>2} on {case['ranks']:>4} ranks  {case['policy']:<10} "
        f"{what:<12} {case['solve_ms_median']:>9.3f} ms  gap {case['gap']:>6.2%}  {case['predicted_seconds']:.3f} s"
    )


def render(report: dict[str, Any]) -> str:
    """The cases as a table."""
    head = (
        f"profile {report['profile']} ({report['profile_kind']}), medians of {report['repeats']} after warming up, "
        f"BLAS threads {report['blas_threads'] or 'not set'}"
    )
    return "\n".join([head, *map(_line, report["cases"])])


def write(report: dict[str, Any], path: str) -> None:
    """The report as JSON."""
    Path(path).write_text(json.dumps(report, indent=1) + "\n")
