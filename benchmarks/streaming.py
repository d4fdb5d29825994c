"""Several trees in one pass, their stages side by side or one after another: time blocked on bytes, and peak memory.

`python benchmarks/streaming.py [--world-size 2] [--trees 4] [--repeats 5] [--json FILE]`. Interleaved, medians, maxima
over ranks; rank 0 prints one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from treecp_rl.bench.memory import peak_bytes
from treecp_rl.engine.capabilities import prepare_model
from treecp_rl.engine.passes import Domain, PassOptions, plan_passes, run_passes
from treecp_rl.tree import Row
from treecp_rl.verify.models import random_model, tiny_config

PROMPT, RESPONSES = 512, (96, 128, 64, 80)


def rows_of(num_trees: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, 500, (count,), generator=generator)

    prompts = [tokens(PROMPT) for _ in range(num_trees)]
    return [Row(f"tree{i}", prompt, tokens(n)) for i, prompt in enumerate(prompts) for n in RESPONSES]


def run_rank(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world_size = arguments.world_size
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
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
    if rank == 0:
        cases = [
            {
                "streaming": streaming,
                "seconds": statistics.median(wall for wall, _ in found),
                "cpu_seconds": min(cpu for _, cpu in found),
                "peak_bytes": int(peaks[streaming]),
            }
            for streaming, found in seconds.items()
        ]
        record = {
            "world_size": world_size,
            "trees": arguments.trees,
            "repeats": arguments.repeats,
            "cases": cases,
        }
        print(json.dumps(record, indent=2))
        if arguments.json:
            with open(arguments.json, "w") as file:
                file.write(json.dumps(record, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--trees", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, (directory, chosen), nprocs=chosen.world_size)
