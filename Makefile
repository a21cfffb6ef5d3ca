# What a user and a developer need; `make help` says it.
# Everything happens in .venv. `make PYTHON=python3.12 …` uses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
# Tests at once: they wait for processes more than they compute. Those of a file stay in order.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --durations 25 -rs
IMAGE ?= raywire:demo
EXTRAS ?= demo
# PyTorch's wheels in the image; of your CUDA version, for GPUs.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.DELETE_ON_ERROR:
.PHONY: help demo demo-cluster test test-slow test-gpu explore soak manifests image lint bench clean

help:
	@echo 'make demo          serve a small real model here and show a streamed answer (PORT=8000)'
	@echo 'make demo-cluster  the same as a job on a Ray cluster of this machine, with two ranks'
	@echo 'make test          linters, types, layers and the tests; under ten minutes on two cores'
	@echo 'make test-slow     what takes minutes: clients, faults, hosts, fuzzing'
	@echo 'make lint          only the first part of make test'
	@echo 'make test-gpu      what only a CUDA device can prove'
	@echo 'make explore       property tests with examples that no run had before'
	@echo 'make soak          30 minutes of load with a fault a minute; SOAK="--minutes 3 --seed 7"'
	@echo 'make bench         speed and memory; VLLM=VENV/bin/python measures vLLM in turns with it'
	@echo 'make image         a container image (IMAGE=raywire:demo EXTRAS=demo TORCH_INDEX=URL)'
	@echo 'make manifests     the files in k8s/, anew'
	@echo 'make clean         remove .venv and what the tools have cached'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Two stamps, so that a demo does not wait for the developers' tools.
$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	@echo 'installing into $(VENV); the first time takes minutes'
	@$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	@echo 'installing into $(VENV); the first time takes minutes'
	@$(BIN)/python -m pip install --quiet --editable '.[demo,dev]'
	@touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp
	@$(BIN)/python -m cluster.demo --port $(PORT) --log $(VENV)/demo-$(PORT).log

demo-cluster: $(VENV)/demo.stamp
	@$(BIN)/python -m cluster.demo_cluster --port $(PORT) --log $(VENV)/demo-cluster-$(PORT).log

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(PYTEST) -m 'not slow and not gpu'

test-slow: $(VENV)/dev.stamp
	$(PYTEST) -m 'slow and not gpu' --timeout 600

test-gpu: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m gpu --timeout 600

explore: $(VENV)/dev.stamp
	$(PYTEST) -m 'hypothesis and not gpu' --hypothesis-profile explore --timeout 600

soak: $(VENV)/dev.stamp
	$(BIN)/python -m tests.soak --write $(SOAK)

manifests: $(VENV)/demo.stamp
	PATH="$(abspath $(BIN)):$$PATH" k8s/render.sh

image:
	docker build --build-arg EXTRAS=$(EXTRAS) --build-arg TORCH_INDEX=$(TORCH_INDEX) --tag $(IMAGE) .

bench: $(VENV)/dev.stamp
	$(BIN)/python -m tests.bench $(if $(VLLM),--vllm-python $(VLLM)) $(BENCH)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
