PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
CONNECTOR ?= nixl_pull
BASE ?= 0.32.0
N ?= 1000000
MINUTES ?= 30
WORKERS ?= 2
# A file's tests share its servers. In the order of collection, so that the servers' files come early.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
UNITS := "not e2e and not slow and not campaign and not upstream"
# What make unit-base runs: units, but for the mutants', which read nothing of a release.
BASE_UNITS := tests/v1 tests/series --ignore=tests/series/test_mutants.py

.DEFAULT_GOAL := help
.PHONY: help env unit test test-slow unit-base test-base test-upstream test-gpu gpu-report lint bench bench-serving campaign mutants \
	fuzz soak demo clean

help:
	@echo "make env    build or complete the environment in $(VENV)"
	@echo "make lint   ruff and mypy"
	@echo "make unit   the tests that need no servers"
	@echo "make test   every test, with real vLLM servers (WORKERS=2 files at a time)"
	@echo "make test-slow  what make test leaves out: the real wheel of vLLM, more orders of events"
	@echo "make unit-base  the unit tests on another supported vLLM (BASE=0.32.0); the continuous"
	@echo "            integration runs them on every one"
	@echo "make test-base  the unit tests on another supported vLLM, and real servers of it (BASE=0.32.0)"
	@echo "make test-upstream  vLLM's own tests: what passes on stock passes on the patched tree"
	@echo "            (downloads vLLM's source distribution; half an hour and more)"
	@echo "make bench  what the checks cost: summing KV, the code on the host, and loads from a store"
	@echo "make bench-serving  what the checks cost a served request: the engine's thread without a"
	@echo "            forward pass, and real servers (two hours)"
	@echo "make campaign  a million damaged blocks, and the table of outcomes (N=blocks)"
	@echo "make mutants  one-line breaks of the feature: every one must fail a unit test"
	@echo "            (IDS='S01 U02' runs these alone; each takes about 10 s)"
	@echo "make fuzz   fuzz what clients and peers can send (MINUTES=30, one core)"
	@echo "make demo   corrupt a transfer between two real servers and watch it being caught"
	@echo "            (CONNECTOR=nixl_pull, nixl_push or mooncake)"
	@echo "make soak   half an hour of mixed load over NIXL with damaged transfers (MINUTES=30)"
	@echo "make test-gpu  the tests that need a CUDA card, in $(VENV)-gpu (GPU_PYTHON=an environment"
	@echo "            to use as it is); without a card it fails with status 77"
	@echo "make gpu-report  measure the kernel on a CUDA card, in 8 minutes (GPU_PYTHON=a Python with"
	@echo "            torch and Triton); without a card it fails with status 77"
	@echo "make clean  remove $(VENV) and .rig"

env:
	@$(PYTHON) tests/rig/env.py --venv $(VENV)

unit: env
	$(BIN)/python -m pytest tests -m $(UNITS) $(PARALLEL) -q

test: env
	$(BIN)/python -m pytest tests -m "not slow" $(PARALLEL) --durations=30

test-slow: env
	$(BIN)/python -m pytest tests -m slow

unit-base: env
	$(BIN)/python tests/rig/older.py $(BASE)
	PYTHONPATH=$(CURDIR)/.rig/vllm-$(BASE) $(BIN)/python -m pytest $(BASE_UNITS) -m $(UNITS) $(PARALLEL) -q --durations=15

test-base: unit-base
	PYTHONPATH=$(CURDIR)/.rig/vllm-$(BASE) $(BIN)/python -m pytest tests/e2e -m "not slow" $(PARALLEL) -q --durations=15

test-upstream: env
	$(BIN)/python tests/rig/upstream.py

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy tests/rig
	$(BIN)/mypy --exclude /test_ benchmarks/fault_spacing.py benchmarks/plots.py benchmarks/benchmark_kv_checksum_store.py benchmarks/benchmark_kv_checksum_ledger.py benchmarks/benchmark_kv_checksum_engine.py benchmarks/benchmark_serving.py benchmarks/benchmark_serving_switched.py benchmarks/serving_ratios.py benchmarks/evidence.py benchmarks/originals.py benchmarks/cost_plots.py benchmarks/kernels/kernel_instructions.py benchmarks/kernels/benchmark_cpu_layouts.py benchmarks/kernels/gpu_report.py benchmarks/kernels/kernel_variants.py benchmarks/kernels/bare_worker.py tests/campaign benchmarks/spacing

mutants: env
	$(BIN)/python tests/rig/mutants.py $(IDS)

fuzz: env
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES)

bench-serving: env
	$(BIN)/python benchmarks/benchmark_kv_checksum_engine.py
	$(BIN)/python benchmarks/benchmark_serving.py
	$(BIN)/python benchmarks/benchmark_serving_switched.py

bench: env
	$(BIN)/python benchmarks/kernels/benchmark_kv_checksum.py
	$(BIN)/python benchmarks/kernels/benchmark_cpu_layouts.py
	$(BIN)/python benchmarks/benchmark_kv_checksum_host.py
	$(BIN)/python benchmarks/benchmark_kv_checksum_ledger.py
	$(BIN)/python benchmarks/benchmark_kv_checksum_store.py

campaign: env
	$(BIN)/python tests/campaign/run.py --n $(N)

demo: env
	$(BIN)/python tests/e2e/demo.py --connector $(CONNECTOR)

soak: env
	$(BIN)/python tests/e2e/soak.py --minutes $(MINUTES)

test-gpu:
	@$(PYTHON) tests/rig/gpu.py $(if $(GPU_PYTHON),--python $(GPU_PYTHON))

gpu-report:
	@$(or $(GPU_PYTHON),$(firstword $(wildcard $(VENV)-gpu/bin/python $(VENV)-gpu-alone/bin/python $(BIN)/python) \
		$(PYTHON))) benchmarks/kernels/gpu_report.py

clean:
	rm -rf $(VENV) $(VENV)-gpu $(VENV)-gpu-alone .rig
