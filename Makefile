# Needs Python >= 3.11 (with its venv module) and make. `make demo` and `make test` are where to start.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU_PYTHON ?= $(BIN)/python
PEERS := $(VENV)/.peers
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help install demo test test-gpu test-kills check serve fuzz bench bench-peers proto lock format lint types proto-check docker-check deploy-check clean

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

test-kills: $(STAMP) ## kill a service under load 200 times, and compare what comes back
	DRAFTD_KILLS=200 $(BIN)/python -m pytest -s tests/e2e/test_restart.py

test-gpu: $(STAMP) ## run the tests that need a GPU, with a Python that has torch and triton: make test-gpu GPU_PYTHON=...
	$(GPU_PYTHON) -m pytest tests/gpu

check: format lint types proto-check docker-check deploy-check test ## everything that CI runs, tests included

serve: $(STAMP) ## run the service in the foreground
	$(BIN)/draftd serve

fuzz: $(STAMP) ## run the fuzz tests for longer: make fuzz DRAFTD_FUZZ_S=600
	DRAFTD_FUZZ_S=$(or $(DRAFTD_FUZZ_S),120) $(BIN)/python -m pytest tests/fuzz --timeout=0

bench: $(STAMP) ## measure this machine; peers are measured too where `make bench-peers` was run
	$(BIN)/python -m bench

bench-peers: $(PEERS) ## install what the benchmarks compare with (arctic-inference, built from source; see bench/README.md)

$(PEERS): $(STAMP) bench/peers.lock
	$(PIP) install -r bench/peers.lock
	$(PIP) install --no-build-isolation --no-deps arctic-inference==0.3.0
	touch $@

proto: $(STAMP) ## write the Python stubs from the .proto file
	proto/generate.sh $(BIN)/python

lock: $(STAMP) ## write both locks anew from pyproject.toml (newest releases; gRPC, protobuf, torch and triton stay)
	$(PIP) install uv
	{ sed -n '1p' requirements.lock; \
	  grep -E '^(grpcio|protobuf|torch|triton)' requirements.lock | $(BIN)/uv pip compile --universal --python-version 3.11 --extra dev --no-header \
	    --no-annotate --quiet --constraint - pyproject.toml | grep -vE '^(cuda|nvidia)-'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock
	{ sed -n '1p' requirements-cuda.lock; \
	  $(BIN)/uv pip compile --python-version 3.12 --python-platform x86_64-manylinux_2_28 --extra server --extra gpu --extra nats --extra otel --no-header \
	    --no-annotate --quiet --constraint requirements.lock pyproject.toml; } > requirements-cuda.lock.new
	mv requirements-cuda.lock.new requirements-cuda.lock

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

# What pytest leaves out where it is missing; the chart and the dashboard need Python alone and are checked by `make test`.
deploy-check: ## check the alerts with promtool
	@command -v promtool >/dev/null || { echo "promtool is missing; on Debian: apt-get install prometheus" >&2; exit 1; }
	promtool check rules deploy/prometheus/alerts.yaml
	promtool test rules tests/deploy/alerts_test.yaml

clean: ## remove .venv and caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
