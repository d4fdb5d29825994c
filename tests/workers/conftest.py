"""One CPU platform and one small Ray cluster for all tests of the workers."""

import os
import tempfile

# Before anything imports verl: its platform is chosen once a process.
os.environ["VERL_PLATFORM"] = "cpu"

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    """A local cluster with two logical slots. Its files lie under a short path: Ray's sockets limit its length."""
    import ray

    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray spells it so)
    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=32,  # logical: verl asks for three CPUs a slot
            num_gpus=2,  # logical slots, see PlatformCPU.ray_resource_name
            include_dashboard=False,
            _temp_dir=tempfile.mkdtemp(prefix="ray_"),
            runtime_env={"env_vars": {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}},
        )
    yield ray
    if started:
        ray.shutdown()
