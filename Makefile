# One command each: `make demo`, `make test`. Both set up everything they need in .venv first.

PYTHON ?= python3
# A plain `torch` pulls gigabytes of CUDA packages; override to install another build.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
SOURCES := aiocomms transports tests examples benchmarks

.PHONY: demo serve test lint format conformance bench docs clean

$(VENV)/setup.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[demo,test]"
	touch $@

## Start the embedding server on 2 ranks, post the sentences of a file, check every vector, print a table.
demo: $(VENV)/setup.stamp
	cd examples && $(BIN)/python -m embedding_server.demo

## Leave the embedding server running on 2 ranks.
serve: $(VENV)/setup.stamp
	cd examples && $(BIN)/torchrun --standalone --nproc-per-node 2 -m embedding_server --port 8000

## Everything: lint, types, tests, docs, examples, and the conformance suite on every built-in transport.
test: lint
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --pyargs aiocomms.testing.conformance --transport=local --transport=c10d

lint: $(VENV)/setup.stamp
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: $(VENV)/setup.stamp
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

## The documentation as a site, in site/.
docs: $(VENV)/setup.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	$(BIN)/python -m mkdocs build --strict

## The conformance suite alone: make conformance TRANSPORT=c10d
conformance: $(VENV)/setup.stamp
	$(BIN)/python -m pytest --pyargs aiocomms.testing.conformance --transport=$(or $(TRANSPORT),local)

## Overhead of the core alone, as ratios to asyncio.sleep(0), and how free the loop stays; each in one run.
bench: $(VENV)/setup.stamp
	$(BIN)/python -m benchmarks.core
	$(BIN)/python -m benchmarks.heartbeat

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
