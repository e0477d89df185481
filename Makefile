# Everything happens in .venv, made on first use and renewed when the dependencies change.
#
#   make run           train six methods on a bundled data set and compare them
#   make test          what continuous integration runs: lint, types, tests
#   make test-fast     the quick tests, without servers, for the inner loop
#   make lint          ruff, mypy and which room imports which
#   make check-method  all that a method must pass, and lint: make check-method M=fedavg
#   make docs          the documentation site, strictly, into site/
#   make notebooks     run the notebooks again, outputs included
#   make readme        write the tables of README.md and of docs/
#   make report        write results/README.md and results/report.html from the records
#   make bench         speed and memory, written to $(BENCH_JSON)
#   make gpu           what only a GPU can show, in ten minutes (benchmarks/README.md)
#   make clean         remove .venv, caches and builds; runs/ and results/ stay
#
# On Linux the default PyTorch wheels carry CUDA. For the much smaller CPU build:
#   make run TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH_ARGS ?=
PYTEST_ARGS ?=
BENCH_JSON ?= .benchmarks/latest.json
DEVICE ?= cuda
GPU_OUT ?= runs/gpu
GPU_MINUTES ?= 10
GPU_PARTS ?=
GPU_SETTINGS ?=

VENV := .venv
BIN := $(VENV)/bin
MADE := $(VENV)/.made
USABLE := $(VENV)/.usable
READY := $(VENV)/.ready
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
WORKERS = $(shell $(PYTHON) -c 'import os; print(1 + ($(CORES)))')

# Or each of the many processes below would compile the whole project anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := test
.PHONY: run test test-fast lint check-method docs notebooks readme report bench gpu clean

# Twice, since what runs trainings is a third of what tests, docs and servers need.
$(USABLE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hyperfed needs Python >= 3.11, this is $$($(PYTHON) --version 2>&1); try make PYTHON=python3.11" >&2; exit 1; }
	@# It is cleared, and nobody's own is to be.
	@if [ -L $(VENV) ] || { [ -e $(VENV) ] && [ ! -e $(MADE) ] && [ ! -e $@ ]; }; then \
	  echo "$(VENV) must be one that make has made, since it is cleared, but is not; remove it, or take make VENV=other" >&2; exit 1; fi
	$(PYTHON) -m venv --clear $(VENV)
	@touch $(MADE)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(TORCH_ARGS) torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

$(READY): $(USABLE)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# A terminal that lacks a letter of the table, such as ±, is told the rest.
run: export PYTHONIOENCODING ?= :replace
run: $(USABLE)
	$(BIN)/python examples/digits.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Threads that wait for one another let go of their core: there are more of them than cores.
test test-fast check-method: export OMP_WAIT_POLICY := passive

# In their order, the slow ones first (tests/conftest.py). Some of these mostly wait, for a real
# federation, so there is a worker more than cores; each takes ten seconds to import everything.
# Those that share what is dear to make are one group.
test: $(READY)
	$(MAKE) -j2 lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-fast: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" $(PYTEST_ARGS)

check-method: $(READY)
	$(BIN)/python tools/check_method.py $(M)

docs: $(READY)
	PYTHONPATH=tools NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet

notebooks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace docs/notebooks/*.ipynb

readme: $(READY)
	$(BIN)/python tools/readme.py

report: $(READY)
	$(BIN)/python -m hyperfed report --out results/README.md
	$(BIN)/python -m hyperfed report --out results/report.html

bench: $(READY)
	@mkdir -p $(dir $(BENCH_JSON))
	$(BIN)/python -m pytest benchmarks --benchmark-json=$(BENCH_JSON) $(PYTEST_ARGS)

gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py --device $(DEVICE) --out $(GPU_OUT) --minutes $(GPU_MINUTES) \
	  --parts "$(GPU_PARTS)" $(GPU_SETTINGS)

clean:
	rm -rf $(VENV) build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
