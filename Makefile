# Everything below needs only make and Python 3.11 or later; it installs what it uses into $(VENV).
PYTHON ?= python3
VENV   ?= .venv
TESTS  ?= tests
CASES  ?= 10000
# By file, since what a file's tests share (checkpoints, processes that restored them) is made once for it.
PYTEST_ARGS ?= -n 2 --dist loadfile --durations=25

BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test fuzz test-topologies test-gpu-topologies support lint format types clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

# The stamps make a second `make` skip the installation until the dependencies change.
$(VENV)/.installed-test: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

install: $(VENV)/.installed-dev  ## Create the environment with everything for development.

demo: $(VENV)/.installed-test  ## Train, kill, restart on the same and on other devices; print what it cost.
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test  ## Run the tests; TESTS=path or PYTEST_ARGS=... choose which and how.
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(TESTS)

support: $(VENV)/.installed-test  ## Renew docs/support.md: what a checkpoint can carry under this JAX.
	PYTHONPATH=. $(BIN)/python tests/support/support_matrix.py

# Beside the environment, not in it: with libtpu installed, JAX looks for TPUs at every start.
$(VENV)/libtpu: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ \
	  "$$($(BIN)/python -c 'import importlib.metadata as m; print(next(r.partition(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))')"

test-topologies: $(VENV)/libtpu  ## Compile for TPUs on this machine, which has none (downloads 140 MB).
	ORBAX_AOT_LIBTPU=$(abspath $(VENV)/libtpu) $(BIN)/python -m pytest tests/topologies/test_tpu.py

$(VENV)/cuda: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ \
	  "$$($(BIN)/python -c 'import importlib.metadata as m; print("jax-cuda13-plugin[with-cuda]==" + m.version("jax"))')"

test-gpu-topologies: $(VENV)/cuda  ## Compile for NVIDIA GPUs on this machine, which has none (downloads 4.3 GB).
	ORBAX_AOT_CUDA=$(abspath $(VENV)/cuda) $(BIN)/python -m pytest tests/topologies/test_gpu.py

fuzz: $(VENV)/.installed-test  ## Restore damaged artifacts; CASES=n chooses how many, FUZZ_ARGS=... the rest.
	$(BIN)/python tests/fuzz/fuzz_run.py --cases $(CASES) $(FUZZ_ARGS)

lint: $(VENV)/.installed-dev  ## Check style, formatting and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev  ## Rewrite the code in the project's format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove environments, caches and what the demo wrote.
	rm -rf .venv .venv-* $(VENV) out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
