# Needs Python >= 3.11 (with its venv module) and make. `make demo` and `make test` are where to start.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU_PYTHON ?= $(BIN)/python
PEERS := $(VENV)/.peers
PIP := $(BIN)/pip --disable-pip-version-check --quiet
MANIFESTS := $(filter-out %/kustomization.yaml,$(wildcard deploy/kubernetes/*.yaml))

.DEFAULT_GOAL := help
.PHONY: help install demo test test-gpu check serve bench bench-peers proto lock format lint types proto-check docker-check deploy-check clean

help: ## show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## make .venv from requirements.lock

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "draftd needs Python >= 3.11: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

demo: $(STAMP) ## replay the sample traces with 4 engines: one shared corpus against a silo each
	$(BIN)/python -m draftd.server.replay.demo

# grpc_tools finds its mypy plugin, and tests the tools they start, on PATH.
test proto proto-check: export PATH := $(abspath $(BIN)):$(PATH)

test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest

test-gpu: $(STAMP) ## run the tests that need a GPU, with a Python that has torch and triton: make test-gpu GPU_PYTHON=...
	$(GPU_PYTHON) -m pytest tests/gpu

check: format lint types proto-check docker-check deploy-check test ## everything that CI runs, tests included

serve: $(STAMP) ## run the service in the foreground
	$(BIN)/draftd serve

bench: $(STAMP) ## measure this machine; peers are measured too where `make bench-peers` was run
	$(BIN)/python -m bench

bench-peers: $(PEERS) ## install what the benchmarks compare with (arctic-inference, built from source; see bench/README.md)

$(PEERS): $(STAMP) bench/peers.lock
	$(PIP) install -r bench/peers.lock
	$(PIP) install --no-build-isolation --no-deps arctic-inference==0.3.0
	touch $@

proto: $(STAMP) ## write the Python stubs from the .proto file
	proto/generate.sh $(BIN)/python

lock: $(STAMP) ## write requirements.lock anew from pyproject.toml (newest releases; gRPC and protobuf stay)
	$(PIP) install uv
	{ sed -n '1p' requirements.lock; \
	  grep -E '^(grpcio|protobuf)' requirements.lock | $(BIN)/uv pip compile --universal --python-version 3.11 --extra dev --no-header \
	    --no-annotate --quiet --constraint - pyproject.toml; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

proto-check: $(STAMP) ## lint the .proto file; the stubs must be what it generates
	cd proto && buf lint
	@work=$$(mktemp -d) && trap 'rm -rf "$$work"' EXIT && mkdir -p "$$work/src/draftd" && cp -r proto "$$work/proto" && \
	ln -s ../../proto "$$work/src/draftd/proto" && "$$work/proto/generate.sh" $(abspath $(BIN))/python && \
	diff -r --exclude=__pycache__ proto "$$work/proto" || { echo "the stubs are out of date: make proto" >&2; exit 1; }

docker-check: $(STAMP)
	$(BIN)/hadolint Dockerfile

deploy-check: $(STAMP)
	$(BIN)/kubernetes-validate --strict --quiet $(MANIFESTS)

clean: ## remove .venv and caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
