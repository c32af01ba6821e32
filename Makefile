# Everything runs from .venv, which `setup` makes. Stages are run as `python -m stages.x`: they must find its python.
SHELL := bash
PY := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup repro test faults check lock

help: ## Show what can be made
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## Install the locked environment that fits this machine into .venv
	@scripts/setup.sh

repro: setup ## Run the pipeline, on a sample corpus where data/raw is empty
	@$(PY) -m scripts.sample_corpus
	.venv/bin/dvc repro

test: setup ## Run the quick tests
	$(PY) -m pytest -m "not slow" -n 2 --dist loadfile

faults: setup ## Kill, stop and starve trainings in every way of docs/faults.md
	$(PY) -m pytest tests/test_checkpoints.py tests/test_resume.py tests/test_launch.py tests/test_faults.py

check: setup ## Lint, check the format and the types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# $(1): version of torch, $(2): lowest version of Python, UPGRADE=--upgrade: newer versions than the lock already has.
compile = $(PY) -m uv pip compile pyproject.toml - --extra dev --universal --python-version $(2) \
	--generate-hashes --no-annotate --custom-compile-command "make lock" --quiet $(UPGRADE) <<< torch==$(1)

lock: setup ## Write both locks anew from pyproject.toml
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(call compile,2.13.0+cpu,3.11) --output-file requirements-cpu.lock
	$(call compile,2.13.0,3.10) --output-file requirements-cuda.lock
