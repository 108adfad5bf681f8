# Every target sets up what it needs of a virtual environment first; only a changed pyproject.toml repeats that.

PYTHON ?= python3
VENV ?= .venv
# The torch to install; a machine without a GPU saves gigabytes by its CPU wheels (README).
TORCH ?= $(shell $(PYTHON) -c 'import sys; print("torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch>=2.13,<2.16")')
BIN := $(VENV)/bin
RUN := $(VENV)/.runs
STAMP := $(VENV)/.installed
# Three workers on two cores: they wait for ranks as long as they compute.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

# Compiled modules are kept: the tests start hundreds of processes that import them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test quick check test-slow test-long bench plan-zoo mutants docs docs-test

run: $(RUN)
	$(BIN)/python examples/photographs.py

test: $(STAMP)
	$(PYTEST)

# The tests of one room: make quick ROOM=trace
quick: $(STAMP)
	$(PYTEST) tests/$(ROOM)

check: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m tests.counts
	$(PYTEST)

test-slow: $(STAMP)
	$(PYTEST) -m slow

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks

plan-zoo: $(STAMP)
	$(BIN)/python -m pip install -e '.[zoo]'
	$(BIN)/python -m tests.benchmarks.zoo

# The pages as a site, in build/docs; a warning is an error.
docs: $(STAMP)
	$(BIN)/python -m pip install -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -b html -c docs . build/docs

# Every block of code and every command of the pages, run.
docs-test: $(STAMP)
	$(BIN)/python -m pytest tests/docs -m 'long or not long'

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# torch goes first: its build for this Python must be settled before a dependency asks for any torch.
$(RUN): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e '.[examples]'
	touch $(RUN)

$(STAMP): $(RUN)
	$(BIN)/python -m pip install -e '.[test]'
	touch $(STAMP)
