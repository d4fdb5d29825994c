"""A few gloo processes that import verl once and then run one function after another, as ranks of a group."""

import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


class RankPool:
    """``run(function, *args)`` calls a module-level function on every rank and returns their results."""

    def __init__(self, world_size: int) -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, self.folder.name, theirs), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """Results of all ranks; an exception raised on a rank comes back in its place."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                self.close()
                raise TimeoutError(f"rank {rank} did not finish {function.__name__} in {timeout} s")
            results.append(pipe.recv())
        return results

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, world_size: int, folder: str, pipe: Any) -> None:
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "DIST_INIT_METHOD": f"file://{folder}/store",
        "OMP_NUM_THREADS": "1",
    }
    import torch

    torch.set_num_threads(1)
    from verl.utils.distributed import initialize_global_process_group_ray

    initialize_global_process_group_ray()
    while True:
        function, args = pipe.recv()
        try:
            pipe.send(function(*args))
        except Exception as error:
            error.add_note(traceback.format_exc())
            pipe.send(error)
