# make demo    set up, then all commands on the default model: fetch, quantize, serve, bench, chat (recipes/demo.sh)
# make test    set up and run the tests
# make lint    ruff and mypy
# make kernels-all  compile every CUDA kernel for every architecture (over an hour of a core), and run all of them in
#                   emulation; no GPU; JOBS=4 by four processes; what was compiled is kept, so it goes on where it was
#                   interrupted
# make launches     what a step of decoding asks of a GPU, without one: launches, copies, time of the host
# make gpu-check    on a machine with an NVIDIA GPU: the kernels against float64, and beside what the hardware can do
# make wheel   build a wheel into dist/
#
# Everything happens in .venv, which is made when it is missing. PYTHON names the interpreter to make it with.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
JOBS ?= 0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := $(shell find kernels/cpu -name '*.cpp' -o -name '*.hpp' -o -name CMakeLists.txt 2>/dev/null)

.PHONY: help setup demo test test-all kernels-all launches gpu-check lint wheel clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(VENV)/.ready

# torch first and by its exact version, so that nothing else can ask pip for another one.
$(VENV)/.torch: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'error: Python 3.11 or newer is needed; set PYTHON' >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	touch $@

# The extension is built against the checkout (editable): Python changes need nothing, C++ changes come through here.
$(VENV)/.ready: $(VENV)/.torch pyproject.toml constraints.txt $(NATIVE)
	$(PIP) install -q -c constraints.txt 'scikit-build-core>=1.0' 'nanobind>=2.4' 'cmake>=3.25' ninja
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

demo: setup
	recipes/demo.sh

test: setup
	$(BIN)/python -m pytest -q -m 'not slow'

test-all: setup
	$(BIN)/python -m pytest -q

# mypy takes the package's name from its folder, which a clone may have called anything; hence the link.
kernels-all: setup
	LLMCTL_CACHE=build $(BIN)/python -m llmctl kernels build --all --arch all --jobs $(JOBS)
	$(BIN)/python -m pytest -q tests/kernels/cuda

# Uses the packages that are there: PYTHON names an interpreter with torch for CUDA, numpy and msgspec.
launches: setup
	$(BIN)/python tests/kernels/cuda/launches.py

gpu-check:
	$(PYTHON) tests/kernels/cuda/gpu_check.py

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	links=$$(mktemp -d); trap 'rm -rf "$$links"' EXIT; ln -s "$(CURDIR)" "$$links/llmctl"; \
	  python="$(CURDIR)/$(BIN)/python"; cd "$$links" && "$$python" -m mypy --config-file llmctl/pyproject.toml llmctl

wheel: setup
	$(PIP) wheel -q -c constraints.txt --no-build-isolation --no-deps -w dist .

clean:
	rm -rf $(VENV) build dist
