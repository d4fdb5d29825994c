# Everything a fresh machine needs: `make train`, `make test`. Only Python 3.11, make and a C compiler are assumed.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.complete

.PHONY: env peers train train-vllm test lint bench clean

env: $(STAMP)

# The stamp is written last, so an interrupted installation is repeated and never taken for a finished one.
$(STAMP): requirements/cpu.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or run 'make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)'"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

# What benchmarks compare with; their tests run where it is installed.
peers: $(VENV)/.peers

$(VENV)/.peers: requirements/peers.txt $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps -r $<
	@touch $@

train: env
	$(BIN)/python -m recipes.grpo_reasoning_gym.main $(ARGS)

# The same GRPO with rollout.name=vllm, on the CPU build of vLLM, in an environment of its own (about 4 GB).
train-vllm:
	PYTHON=$(PYTHON) recipes/vllm_cpu/make_env.sh .venv-vllm
	.venv-vllm/bin/python -m recipes.vllm_cpu.main $(ARGS)

test: peers lint
	$(BIN)/python -m pytest $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: peers
	$(BIN)/treecp-rl bench step $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
