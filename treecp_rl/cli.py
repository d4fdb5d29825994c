"""`treecp-rl train|verify|doctor|bench step ...`: arguments -> the command's module, imported only then.

Exit codes: 0 all well; 1 a bound missed, a fault found, or a run that failed; 2 a request that cannot be met
(bad arguments, a model that cannot run exactly).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treecp_rl.errors import ConfigError, TreeCPError, UnsupportedModel


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # Everything after these words belongs to Hydra, --help and --cfg too.
    if arguments[:1] == ["train"]:
        return _train(arguments[1:])
    options = parser.parse_args(arguments)
    if "command" not in options:
        parser.print_help()
        return 2
    try:
        return int(options.command(options))
    except (ConfigError, UnsupportedModel) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except TreeCPError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    from treecp_rl import __version__

    parser = argparse.ArgumentParser(
        prog="treecp-rl", description="Train each GRPO prompt once: a backend for verl."
    )
    parser.add_argument("--version", action="version", version=f"treecp-rl {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="train | verify | doctor | plan | calibrate | simulate | bench"
    )
    commands.add_parser("train", help="run GRPO; takes Hydra overrides, as python -m treecp_rl.train does")
    _add_verify(commands.add_parser("verify", help="compare every gradient with a dense float64 reference"))
    _add_doctor(
        commands.add_parser("doctor", help="check versions, plugin, Ray and a config; name each mend")
    )
    _add_plan(commands.add_parser("plan", help="plan a batch from its lengths; explain and draw the plan"))
    _add_calibrate(commands.add_parser("calibrate", help="measure a profile of this machine for the planner"))
    _add_simulate(commands.add_parser("simulate", help="predict the paper's figures on estimated clusters"))
    bench = commands.add_parser(
        "bench", help="measure against verl's own engine, PrefixGrouper and other plans"
    )
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="step | cp | plan", required=True)
    _add_bench_step(benchmarks.add_parser("step"))
    _add_bench_cp(benchmarks.add_parser("cp"))
    _add_bench_plan(benchmarks.add_parser("plan"))
    return parser


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Exactness certificate: log-probs, entropy, loss and every parameter's gradient of the tree engine "
        "against each row forwarded alone in float64. Exit code 1 if a bound is missed."
    )
    parser.add_argument(
        "--model-config", metavar="PATH", help="config.json or its folder (default: tiny Qwen2)"
    )
    parser.add_argument("--num-layers", type=_positive, metavar="N", help="keep only the first N layers")
    parser.add_argument("--vocab-size", type=_positive, metavar="N", help="another vocabulary size")
    parser.add_argument(
        "--lengths",
        metavar="P:R,R;...",
        help="your own groups, or a CSV file with columns group,prompt,response",
    )
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16", "all"], default="float64")
    parser.add_argument(
        "--world-size", type=int, choices=[1, 2, 4, 8], default=1, help="gloo processes (FSDP2)"
    )
    parser.add_argument(
        "--plans",
        default="",
        metavar="all|MODE,...",
        help="make the processes one domain and run every case by each of these modes",
    )
    parser.add_argument("--share", choices=["prompt", "prefix"], default="prompt")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for all spawned ranks"
    )
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON only")
    parser.set_defaults(command=_verify)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Checks an installation and, given Hydra overrides, what a run asks of Ray."
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of treecp_rl.train")
    parser.add_argument("--no-ray", action="store_true", help="skip the checks that start a local Ray")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON only")
    parser.set_defaults(command=_doctor)


def _add_bench_step(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time and peak memory of old log-prob, reference log-prob and update: treecp, verl's FSDP2 engine "
        "and PrefixGrouper, interleaved on the same rows."
    )
    parser.add_argument(
        "--cases", default="2048:64,512:512,64:2048", metavar="P:R,...", help="prompt:response tokens"
    )
    parser.add_argument("--group-size", type=_positive, default=8, metavar="G")
    parser.add_argument("--vocab-size", type=_positive, default=4096, metavar="V")
    parser.add_argument(
        "--repeats", type=_positive, default=3, help="interleaved rounds a case; medians are reported"
    )
    parser.add_argument(
        "--threads", type=_positive, default=1, help="torch threads (default 1: CPU time is then work done)"
    )
    parser.add_argument(
        "--tuned-prefix-grouper", action="store_true", help="give the peer a causal kernel for prompts"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON only")
    parser.set_defaults(command=_bench_step)


def _add_bench_cp(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time, bytes moved and peak memory of one training step over several ranks: every kind of plan, ours and the "
        "published ones, interleaved on the same rows."
    )
    parser.add_argument(
        "--world-sizes", default="2,4", metavar="N,...", help="gloo processes (FSDP2, one domain)"
    )
    parser.add_argument(
        "--budgets", metavar="N,...", help="tokens of a group's rows (default: 8192 to 32768 in five steps)"
    )
    parser.add_argument("--scale", type=float, default=0.125, help="factor on budgets, to fit the machine")
    parser.add_argument("--shapes", metavar="NAME,...", help="length statistics (default: all four)")
    parser.add_argument("--kinds", metavar="KIND,...", help="kinds of plan (default: all)")
    parser.add_argument(
        "--repeats", type=_positive, default=3, help="interleaved rounds; medians are reported"
    )
    parser.add_argument(
        "--close-repeats",
        type=_not_negative,
        default=0,
        help="more rounds of the kinds within 15 % of the fastest, and of auto",
    )
    parser.add_argument(
        "--duel-repeats",
        type=_not_negative,
        default=0,
        help="fresh turns of our fastest kind and the fastest baseline; the median of their ratios is then the ratio",
    )
    parser.add_argument("--profile", metavar="FILE", help="what auto plans with (default: an estimate)")
    parser.add_argument("--threads", type=_positive, default=1, help="torch threads of a rank")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="for the ranks of one world size"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write a chrome trace of one step of the first kind, rank 0"
    )
    parser.add_argument("--output", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--json", action="store_true", help="print the report as JSON only")
    parser.set_defaults(command=_bench_cp)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plans a batch of groups on one domain: which trees share a pass, on which ranks each runs and what moves. "
        "Predictions are as good as the profile: shipped ones are estimates."
    )
    parser.add_argument(
        "--lengths", required=True, metavar="FILE", help="CSV group,prompt,response; JSON lines; a verl dump"
    )
    parser.add_argument("--ranks", type=_positive, required=True, metavar="N", help="ranks of the domain")
    parser.add_argument("--profile", default="h100", metavar="NAME|FILE", help="shipped: h100, h200")
    parser.add_argument("--model", metavar="NAME", help="estimate for another model on --profile's hardware")
    parser.add_argument("--policy", choices=["auto", "nsp", "disjoint", "static"], default="auto")
    parser.add_argument("--degree", type=_positive, metavar="D", help="of policy static")
    parser.add_argument(
        "--effort",
        choices=["run", "fast", "thorough"],
        default="run",
        help="of policy auto; run: as a run plans, small batches by their schedules; fast: by closed forms; "
        "thorough: also what the other policies would do",
    )
    parser.add_argument("--tokens-per-rank", type=_positive, metavar="N", help="budget of a pass")
    parser.add_argument("--no-checkpointing", action="store_true", help="layers keep their activations")
    parser.add_argument("--forward-only", action="store_true", help="log-probs, no gradients")
    parser.add_argument(
        "--compare", action="store_true", help="what other policies and no sharing would cost"
    )
    parser.add_argument("--picture", metavar="FILE", help="write an SVG: one row a rank")
    parser.add_argument(
        "--characters-per-token", type=float, metavar="X", help="turns the texts of a verl dump into lengths"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON only")
    parser.set_defaults(command=_plan)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Every method's predicted step time at the sizes of AugTree's figures, with honest packed baselines."
    )
    parser.add_argument("--hardware", default="h100", help="h100 or h200")
    parser.add_argument("--ranks", default="8,32", metavar="N,...", help="8 to 1024")
    parser.add_argument("--figures", default="10,14,15b,16,18", metavar="N,...")
    parser.add_argument("--pictures", metavar="FOLDER", help="write each figure there as SVG")
    parser.add_argument("--json", action="store_true", help="print the points as JSON only")
    parser.set_defaults(command=_simulate)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times steps of the engine on random trees, and exchanges between two processes, or between all ranks that "
        "torchrun started on one or more nodes; writes a profile."
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the profile")
    parser.add_argument("--name", default="measured", help="of the profile")
    parser.add_argument(
        "--model-config", metavar="PATH", help="config.json or its folder (default: small Qwen2)"
    )
    parser.add_argument("--num-layers", type=_positive, metavar="N", help="measure only the first N layers")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--num-trees", type=_positive, default=36, help="random trees; a third is held out")
    parser.add_argument(
        "--most-tokens", type=_positive, default=1024, help="of a prompt, and of its responses"
    )
    parser.add_argument("--repeats", type=_positive, default=3)
    parser.add_argument("--threads", type=_positive, default=1, help="torch threads of a rank")
    parser.add_argument(
        "--ranks-per-node", type=_positive, metavar="N", help="of the profile; default: as launched, or 8"
    )
    parser.add_argument(
        "--plan-ranks",
        type=_positive,
        default=2,
        metavar="2|4|8",
        help="CPU ranks on which plans are run; as many as share this machine in a run",
    )
    parser.add_argument(
        "--check", action="store_true", help="run more plans on these ranks; report error and order"
    )
    parser.add_argument("--check-points", type=_positive, default=4, help="batches of --check")
    parser.add_argument("--json", action="store_true", help="print the report as JSON only")
    parser.set_defaults(command=_calibrate)


def _add_bench_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time to plan trees and batches, gaps to the lower bound, and peers' plans on equal costs."
    )
    parser.add_argument("--profile", default="h100", metavar="NAME|FILE")
    parser.add_argument("--repeats", type=_positive, default=7, help="timed after one for warming up")
    parser.add_argument("--seeds", type=_positive, default=3, help="batches of each kind")
    parser.add_argument("--peers", action="store_true", help="also the other policies on small batches")
    parser.add_argument("--output", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--json", action="store_true", help="print the report as JSON only")
    parser.set_defaults(command=_bench_plan)


def _positive(text: str) -> int:
    """A whole number of 1 or more; argparse turns the refusal into a usage line that names the flag."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a whole number of 1 or more")
    return number


def _not_negative(text: str) -> int:
    """A whole number of 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is not a whole number of 0 or more")
    return number


def _train(overrides: list[str]) -> int:
    from treecp_rl.train import main as train

    train(overrides)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from treecp_rl.verify.cases import parse_lengths
    from treecp_rl.verify.certificate import PLANS, VerifyOptions, certify, render

    try:
        lengths = parse_lengths(options.lengths) if options.lengths is not None else None
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    certificate = certify(
        VerifyOptions(
            model_config=options.model_config,
            num_layers=options.num_layers,
            vocab_size=options.vocab_size,
            lengths=lengths,
            dtype=options.dtype,
            world_size=options.world_size,
            share=options.share,
            timeout_seconds=options.timeout,
            plans=PLANS if options.plans == "all" else tuple(filter(None, options.plans.split(","))),
        )
    )
    _print(certificate.as_json(), render(certificate), options.json)
    return 0 if certificate.passed else 1


def _doctor(options: argparse.Namespace) -> int:
    from treecp_rl.doctor import examine, render

    report = examine(options.overrides, start_ray=not options.no_ray)
    _print(report.as_json(), render(report), options.json)
    return 0 if report.healthy else 1


def _bench_step(options: argparse.Namespace) -> int:
    from treecp_rl.bench.step import BenchOptions, measure, parse_cases, render

    report = measure(
        BenchOptions(
            cases=parse_cases(options.cases),
            group_size=options.group_size,
            vocab_size=options.vocab_size,
            repeats=options.repeats,
            threads=options.threads,
            tuned_peer=options.tuned_prefix_grouper,
        ),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    _print(report.as_json(), render(report), options.json)
    return 0


def _bench_cp(options: argparse.Namespace) -> int:
    from treecp_rl.bench.cp import BenchOptions, file_text, measure, parse_kinds, parse_numbers, render

    asked: dict[str, Any] = {"world_sizes": parse_numbers("--world-sizes", options.world_sizes)}
    if options.budgets is not None:
        asked["budgets"] = parse_numbers("--budgets", options.budgets)
    if options.shapes is not None:
        asked["shapes"] = tuple(options.shapes.split(","))
    if options.kinds is not None:
        asked["kinds"] = parse_kinds(options.kinds)
    for flag, file in (("--output", options.output), ("--trace", options.trace)):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {file}: no such folder; create it, or name another")
    report = measure(
        BenchOptions(
            **asked,
            scale=options.scale,
            repeats=options.repeats,
            close_repeats=options.close_repeats,
            duel_repeats=options.duel_repeats,
            profile=options.profile,
            threads=options.threads,
            timeout_seconds=options.timeout,
            trace_file=options.trace,
        ),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.output is not None:
        Path(options.output).write_text(file_text(report))
    _print(report.as_json(), render(report), options.json)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from treecp_rl.bench.plan import PlanRequest, answer

    found = answer(
        PlanRequest(
            lengths=options.lengths,
            ranks=options.ranks,
            profile=options.profile,
            model=options.model,
            policy=options.policy,
            degree=options.degree,
            effort=options.effort,
            tokens_per_rank=options.tokens_per_rank,
            checkpointing=not options.no_checkpointing,
            forward_only=options.forward_only,
            compare=options.compare,
            picture=options.picture,
            characters_per_token=options.characters_per_token,
        )
    )
    _print(found.record, found.text, options.json)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from treecp_rl.simulator.figures import as_json, render, simulate
    from treecp_rl.simulator.pictures import write_pictures

    try:
        ranks = [int(count) for count in options.ranks.split(",")]
    except ValueError as error:
        raise ConfigError(f"--ranks {options.ranks!r}: write whole numbers, such as 8,32") from error
    if options.pictures is not None and not Path(options.pictures).is_dir():
        raise ConfigError(f"--pictures {options.pictures}: no such folder; create it, or name another")
    found = simulate(options.hardware, ranks, options.figures.split(","))
    text = render(found)
    if options.pictures is not None:
        text += "\n\npictures: " + ", ".join(map(str, write_pictures(found, options.pictures)))
    _print(as_json(found), text, options.json)
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from treecp_rl.calibrate import CalibrateOptions, calibrate, render
    from treecp_rl.planner.profile import save_profile

    found = calibrate(
        CalibrateOptions(
            name=options.name,
            model_config=options.model_config,
            num_layers=options.num_layers,
            dtype=options.dtype,
            num_trees=options.num_trees,
            most_tokens=options.most_tokens,
            repeats=options.repeats,
            threads=options.threads,
            ranks_per_node=options.ranks_per_node,
            plan_ranks=options.plan_ranks,
            check=options.check,
            check_points=options.check_points,
        ),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if found is None:
        return 0
    save_profile(found.profile, options.output)
    _print(found.as_json(), render(found), options.json)
    return 0


def _bench_plan(options: argparse.Namespace) -> int:
    from treecp_rl.bench.plan import BenchOptions, measure, render, write

    report = measure(
        BenchOptions(options.profile, options.repeats, options.seeds, options.peers),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.output is not None:
        write(report, options.output)
    _print(report, render(report), options.json)
    return 0


def _print(record: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(record, indent=2) if as_json else text)


if __name__ == "__main__":
    sys.exit(main())
