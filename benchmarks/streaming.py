"""Several trees in one pass, their stages side by side or one after another: time blocked on bytes, and peak memory.

`python benchmarks/streaming.py [--world-size 2] [--trees 4] [--repeats 5] [--json FILE]`. Interleaved, medians, maxima
over ranks; rank 0 prints one JSON object.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from treecp_rl.bench.memory import peak_bytes
from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.passes import Domain, PassOptions, plan_passes, run_passes
from treecp_rl.tree import Row
from treecp_rl.verify.models import random_model, tiny_config
from treecp_rl.verify.ranks import run_on_ranks

PROMPT, RESPONSES = 512, (96, 128, 64, 80)
TIMEOUT_SECONDS = 3600.0


def rows_of(num_trees: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, 500, (count,), generator=generator)

    prompts = [tokens(PROMPT) for _ in range(num_trees)]
    return [Row(f"tree{i}", prompt, tokens(n)) for i, prompt in enumerate(prompts) for n in RESPONSES]


def run_rank(rank: int, world_size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    domain = Domain(rank, world_size, dist.group.WORLD)
    model = random_model(tiny_config(500, hidden_size=256), torch.float32, drawn_in=torch.float32)
    prepare_model(model)
    plan = plan_passes(rows_of(arguments.trees), tokens_per_pass=1 << 30)

    def step(streaming: bool) -> None:
        model.zero_grad(set_to_none=True)
        options = PassOptions(mode="gather", streaming=streaming)
        run_passes(
            model, plan, lambda scores: sum(x.mean() for x in scores.log_probs), options, domain=domain
        )

    def over_ranks(value: float) -> float:
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    peaks = {streaming: over_ranks(peak_bytes(lambda s=streaming: step(s))) for streaming in seconds}
    for _ in range(arguments.repeats):
        for streaming, found in seconds.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step(streaming)
            found.append((over_ranks(time.perf_counter() - wall), over_ranks(time.process_time() - cpu)))
    return [
        {
            "streaming": streaming,
            "seconds": statistics.median(wall for wall, _ in found),
            "cpu_seconds": min(cpu for _, cpu in found),
            "peak_bytes": int(peaks[streaming]),
        }
        for streaming, found in seconds.items()
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--trees", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    chosen = parser.parse_args()
    cases = run_on_ranks(run_rank, chosen.world_size, chosen, timeout_seconds=TIMEOUT_SECONDS)[0]
    record = {
        "world_size": chosen.world_size,
        "trees": chosen.trees,
        "repeats": chosen.repeats,
        "cases": cases,
    }
    text = json.dumps(record, indent=2) + "\n"
    print(text, end="")
    if chosen.json:
        Path(chosen.json).write_text(text)
