# Every command a developer needs; `make` alone lists them. Only Python 3.11+ and make are assumed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What `make up` hands to `millstream up`, e.g. make up ARGS="--topology aggregated --port 6000"
ARGS ?=
# What `make test` hands to pytest, e.g. make test TESTS="tests/unit -k ticket"
TESTS ?=

export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup up test check gen gen-check fmt lint types bench bench-long lock clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv: SGLang for the CPU, the suite, the developers' tools (1-2 minutes)

$(READY): requirements/cpu.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing $$(grep -c == requirements/cpu.lock) pinned packages into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

up: setup ## start the whole suite here: Processor, Prefill and Decode on real SGLang, the demo model
	@$(BIN)/millstream up $(ARGS)

test: setup ## all tests, real SGLang among them (a quarter of an hour on two cores)
	@$(BIN)/python -m pytest $(TESTS)

check: lint types gen-check test ## everything CI runs

gen: setup ## make the Python stubs from proto/
	@buf generate

gen-check: gen ## fail if the committed stubs or protos aren't what `make gen` makes
	@buf format --diff --exit-code
	@git diff --exit-code --stat -- generated
	@test -z "$$(git status --porcelain -- generated)" || { git status --short -- generated; exit 1; }

fmt: setup ## format code and protos
	@ruff format .
	@ruff check --fix --quiet . || true
	@buf format --write

lint: setup ## ruff, the layers, buf lint and buf breaking
	@ruff check .
	@ruff format --check .
	@lint-imports
	@buf lint
	@$(BIN)/python -m tests.support.breaking

types: setup ## mypy --strict
	@mypy

bench: setup ## what a token costs, as a table
	@$(BIN)/python -m tests.benchmarks.stream

bench-long: setup ## what holds for minutes: soak, cancelled streams, restarts, fuzz, telemetry (35 minutes)
	@for name in soak cancelled_streams rolling_restart fuzz telemetry_cost; do \
	  $(BIN)/python -m tests.benchmarks.$$name || exit 1; done

lock: ## resolve requirements/*.in anew and write requirements/*.lock
	@$(PYTHON) requirements/lock.py

clean: ## remove .venv and caches
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .millstream
