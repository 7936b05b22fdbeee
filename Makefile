# Each target makes its own environment (.venv) first, once, and again when pyproject.toml or constraints.txt change;
# test-slow also one with vLLM's CPU build (.venv-vllm), from constraints-vllm.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet install -c constraints.txt
MODEL := models/smollm2-135m

.PHONY: browser help quickstart smollm2 test test-slow chaos lint format docs clean

help:
	@echo "make quickstart   train a small model by asynchronous RL, from nothing, on this machine"
	@echo "make smollm2      a few steps of RL on the pre-trained SmolLM2-135M-Instruct"
	@echo "make test         the tests of every change"
	@echo "make test-slow    the tests that take minutes"
	@echo "make chaos        200 seeded faults in real runs; CHAOS='--count 20' plays fewer"
	@echo "make lint         ruff (lint and format) and mypy"
	@echo "make format       let ruff put the format right"
	@echo "make docs         the documentation site, in site/"
	@echo "make clean        remove .venv, .venv-vllm and caches; runs/ and models/ stay"

quickstart: .venv/installed
	$(BIN)/python examples/quickstart.py

smollm2: $(MODEL)/config.json .venv/installed
	$(BIN)/headway train configs/smollm2.toml

# One thread: the processes under test set their own number, and test processes that share few cores only get in each other's way.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu"
	@echo "make test: all tests passed"

test-slow: .venv/installed .venv/ray .venv/docs .venv-vllm/installed browser
	OMP_NUM_THREADS=1 HEADWAY_VLLM_PYTHON=.venv-vllm/bin/python $(BIN)/python -m pytest -m "slow and not gpu"
	@echo "make test-slow: all slow tests passed"

chaos: .venv/installed .venv/ray .venv-vllm/installed
	OMP_NUM_THREADS=1 HEADWAY_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python PYTHONPATH=$(CURDIR)/tests:$(CURDIR)/tests/support $(BIN)/python -m chaos $(CHAOS)

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@echo "make lint: clean"

format: .venv/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/docs
	$(BIN)/mkdocs build --strict
	@echo "make docs: open site/index.html; its search needs a server: python -m http.server -d site"

# torch comes first and by its pin: asked for by way of another package, pip may choose a build with gigabytes of CUDA.
# setuptools comes with it, so that building the package downloads nothing that is not pinned.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Headway needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; name another with make PYTHON=...")'
	@echo "making the environment in .venv; the first time takes a few minutes"
	@$(PYTHON) -m venv .venv
	@echo "  torch"
	@$(PIP) torch setuptools
	@echo "  everything else"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

.venv-vllm/installed: constraints-vllm.txt bench/vllm_env.py
	@echo "making an environment with vLLM in .venv-vllm; the first time takes a few minutes"
	@rm -rf .venv-vllm
	@$(PYTHON) bench/vllm_env.py .venv-vllm
	@touch $@

.venv/ray: .venv/installed
	@echo "  Ray"
	@$(PIP) --no-build-isolation -e '.[ray]'
	@touch $@

# For the viewer's browser tests, which are skipped where Chromium is missing and cannot be installed.
browser:
	@if ! (command -v chromium && command -v chromedriver) >/dev/null; then \
	  if [ "$$(id -u)" = 0 ]; then echo "  Chromium"; apt-get -qq update; apt-get -qq install -y chromium chromium-driver >/dev/null; fi; \
	  (command -v chromium && command -v chromedriver) >/dev/null || echo "the viewer's browser tests are skipped: there is no Chromium with its driver (apt-get install chromium chromium-driver, as root)"; \
	fi

.venv/docs: .venv/installed
	@echo "  mkdocs"
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@

$(MODEL)/config.json: | .venv/installed
	@$(PIP) --no-build-isolation -e '.[smollm2]'
	$(BIN)/python examples/smollm2_model.py $(MODEL)

clean:
	rm -rf .venv .venv-vllm *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find headway bench examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
