# Every command sets up what it needs on its first run (scripts/setup.sh) and is instant to start after that; but
# for test-gpu and bench-device-copy, which take PYTHON as it is.
# ARGS is passed on, as in:  make demo ARGS="--endpoint-url https://s3.example --bucket kv-cache"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
ROOT := $(CURDIR)
BIN := $(ROOT)/.venv/bin
VLLM_BIN := $(ROOT)/.venv-vllm/bin
ARGS ?=
# For what installs nothing: the environment of this folder where there is one.
PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
# vLLM never runs from the repository's root: the folder kernels/ there would be found before Hugging Face's package.
ELSEWHERE := $(ROOT)/build/run
RGW := $(ROOT)/tests/support/rgw.py
RGW_DIR := $(ROOT)/build/rgw
PORT ?= 7480
EXAMPLES := $(wildcard examples/*.py)

.PHONY: help demo demo-vllm calibrate doctor replay test test-s3 test-vllm test-gpu rgw-start rgw-stop lint types format bench-scheduling bench-slow-tier bench-copy bench-device-copy bench-gate bench-slowed-device bench-object-tier clean setup-core setup-vllm

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | awk -F'\t' '{printf "make %-18s %s\n", $$1, $$2}'

demo: setup-core ## an engine's KV cache outlives the engine: hits from host, fs and obj, identical tokens
	@$(BIN)/python $(ROOT)/examples/demo.py $(ARGS)

demo-vllm: setup-vllm ## the same with a real vLLM on the CPU
	@mkdir -p $(ELSEWHERE) && cd $(ELSEWHERE) && $(VLLM_BIN)/python $(ROOT)/examples/demo_vllm.py $(ARGS)

calibrate: setup-core ## measure a tier: make calibrate ARGS="/mnt/nvme/kv"
	@$(BIN)/kvsluice calibrate $(ARGS)

doctor: setup-core ## what is right and wrong between GPU and host memory here: make doctor ARGS="kv.json"
	@$(BIN)/kvsluice doctor $(ARGS)

replay: setup-core ## gates and queues on modelled devices: make replay ARGS="trace.jsonl.gz --claims"
	@$(BIN)/kvsluice replay $(ARGS)

test: setup-core ## all tests that need neither vLLM nor a Ceph gateway
	@$(BIN)/python -m pytest -m "not vllm and not s3" $(ARGS)

test-s3: setup-core ## the object tier on a real Ceph RADOS Gateway (as root, Debian's packages are added where missing)
	@$(BIN)/python $(RGW) install
	@$(BIN)/python -m pytest -m s3 $(ROOT)/tests/s3 $(ARGS)

rgw-start: setup-core ## such a gateway to try things on: make rgw-start PORT=7480, then what it says
	@$(BIN)/python $(RGW) install
	@$(BIN)/python $(RGW) start $(RGW_DIR) $(PORT)
	@echo 'and the demo on it: make demo ARGS="--endpoint-url http://127.0.0.1:$(PORT)"; its end: make rgw-stop'

rgw-stop: setup-core ## end that gateway; what it stored is gone
	@$(BIN)/python $(RGW) stop $(RGW_DIR)

test-vllm: setup-vllm ## the tests that drive a real vLLM engine
	@mkdir -p $(ELSEWHERE) && cd $(ELSEWHERE) && $(VLLM_BIN)/pytest -c $(ROOT)/pyproject.toml --rootdir $(ROOT) -m vllm $(ROOT)/tests/vllm $(ARGS)

test-gpu: ## on a machine with a CUDA device: facts, correctness, races, copy benchmark; installs nothing (5 minutes)
	@$(PYTHON) $(ROOT)/scripts/test_gpu.py $(ARGS)

lint: setup-core ## ruff: rules and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup-core ## mypy, strict: packages, examples, benchmarks
	@$(BIN)/mypy
	@MYPYPATH=$(ROOT):$(ROOT)/examples $(BIN)/mypy $(EXAMPLES)
	@MYPYPATH=$(ROOT):$(ROOT)/benchmarks $(BIN)/mypy $(wildcard benchmarks/*.py)

format: setup-core ## ruff: apply the format and the fixes that are safe
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench-scheduling: setup-core ## what the connector costs on an engine's scheduling path
	@$(BIN)/python $(ROOT)/benchmarks/scheduling_path.py $(ARGS)

bench-slow-tier: setup-core ## a flood of stores on a tier that is slow for a while: what the gate and memory do
	@$(BIN)/python $(ROOT)/benchmarks/slow_tier.py $(ARGS)

bench-copy: setup-core ## gather and scatter on the CPU beside a plain memcpy
	@$(BIN)/python $(ROOT)/benchmarks/cpu_copy.py $(ARGS)

bench-device-copy: ## copies between a GPU and pinned memory beside a plain copy; installs nothing: ARGS="--claims"
	@PYTHONPATH=$(ROOT) $(PYTHON) $(ROOT)/benchmarks/device_copy.py $(ARGS)

bench-gate: setup-vllm ## one decision and one completion of a gate, beside vLLM's own detector
	@mkdir -p $(ELSEWHERE) && cd $(ELSEWHERE) && $(VLLM_BIN)/python $(ROOT)/benchmarks/gate_cost.py $(ARGS)

bench-slowed-device: setup-core ## stores and loads on a device that is slowed and hung for real (Linux, root, FUSE)
	@$(BIN)/python $(ROOT)/benchmarks/slowed_device.py $(ARGS)

bench-object-tier: setup-core ## the obj tier beside boto3, obstore and plain http: make bench-object-tier ARGS="--endpoint-url URL --claims"
	@$(BIN)/python $(ROOT)/benchmarks/object_tier.py $(ARGS)

setup-core:
	@scripts/setup.sh core

setup-vllm:
	@scripts/setup.sh vllm

clean: ## remove the virtual environments, caches and build results
	rm -rf .venv .venv-vllm build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
