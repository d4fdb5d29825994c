"""The planner stays light: a driver or a laptop can plan without torch."""

import subprocess
import sys


def test_planner_imports_neither_torch_ray_nor_verl():
    code = (
        "import sys, treecp_rl.planner.lower, treecp_rl.planner.batch, treecp_rl.plan;"
        "print([m for m in ('torch', 'ray', 'verl', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
