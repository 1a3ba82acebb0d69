# Each target makes .venv and installs by itself when needed. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
OPTIONAL_VENV := .venv-optional

.PHONY: quickstart test test-slow test-faults test-vllm notebooks docs wheel lint format clean

quickstart: $(INSTALLED)  ## Train the embedded task with CREDIT on this CPU and show what it learnt
	$(BIN)/credit-trl credit-quickstart

# The sandbox has both cores to itself: its tests measure time and send signals. `make wheel` tests the packaging.
test: $(INSTALLED)  ## The fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/sandbox --ignore=tests/packaging
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/sandbox

test-slow: $(INSTALLED)  ## The tests that take longer; those of DeepSpeed, bitsandbytes and Triton where these can be had
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow
	tests/distributed/optional.sh $(VENV) $(OPTIONAL_VENV)

test-vllm:  ## Generation with a real vLLM engine on this CPU, in an environment of its own
	PYTHON=$(PYTHON) tests/vllm_engine/run.sh $(VLLM_VENV)

notebooks: $(INSTALLED)  ## Every notebook in a fresh kernel, its outputs checked; two at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow or not slow" --timeout 900 tests/notebooks

docs: $(INSTALLED)  ## The documentation's site, strict and offline, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheel: $(INSTALLED)  ## Wheel and sdist, into dist/; then what is in them, and the wheel in an environment of its own
	$(BIN)/python -m build --no-isolation
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/packaging -m "slow or not slow"

test-faults: $(INSTALLED)  ## kill -9 at every phase of a step, and a restart that continues bitwise
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -m "slow or not slow"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OPTIONAL_VENV) runs site dist .pytest_cache .ruff_cache .hypothesis

# torch comes first and pinned: a plain `pip install` of a newer one may bring gigabytes of CUDA libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "TRL 1.16 needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": run make with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@
