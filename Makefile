# Everything runs from .venv, which `setup` creates. DVC runs the stages as `python -m stages.x`, so .venv comes first in PATH.
SHELL := bash
PY := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup repro show doctor bundle unbundle test slow faults random-faults slurm slurm-test nfs-test architectures gpu gpu-wheels versions fuzz audit picture parameters check lock

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## Install the locked environment that fits this machine into .venv
	@scripts/setup.sh

# With --allow-missing, DVC needs no raw files if dvc.lock has results of them.
repro: setup ## Run the pipeline, on a sample corpus if data/raw is empty; ARGS=--allow-missing: without raw files
	@[ -e .git ] || grep -qs 'no_scm = true' .dvc/config.local .dvc/config || \
		{ echo "error: without git, DVC needs: .venv/bin/dvc config --local core.no_scm true" >&2; exit 1; }
ifeq ($(filter --allow-missing,$(ARGS)),)
	@$(PY) -m scripts.sample_corpus
endif
	.venv/bin/dvc repro $(ARGS)

# DVC compares the beginnings of the names; what is kept wins over what is dropped. `.*/`, `.*\.lock`, `models` and
# `evals` are files. It sorts by no column that is not there yet.
KEEP ?= validation_loss|steps|tokens|memory
SORT = $(shell grep -qs '"validation_loss": [0-9]' outputs/metrics.json && echo --sort-by validation_loss)
show: setup ## Show the experiments in a table; KEEP='tokens|memory': other metrics; ARGS='--num 5': those of older commits too
	@.venv/bin/dvc exp show --only-changed --keep '$(KEEP)' $(SORT) \
		--drop '.*/|.*\.lock|models$$|evals$$|Created|Executor|.*loss|steps|tokens|memory|perplexity|bits' $(ARGS)

# Without `setup`: it reports what is not set up.
doctor: ## Check this machine before a job: GPUs, disks and locks, the model cache, DVC, Slurm
	@$(or $(wildcard $(PY)),python3) -m stages.doctor $(ARGS)

bundle: setup ## Write all that a machine without internet access needs into bundle/; ARGS=--help lists options
	@$(PY) -m scripts.bundle $(ARGS)

# Without `setup`, which can install nothing there before this. A new machine has no Makefile: docs/air-gap.md.
BUNDLE ?= bundle
TARGET ?= .
unbundle: ## Verify the bundle in BUNDLE, then install it in TARGET (by default, here)
	@python3 "$(BUNDLE)/unbundle.py" "$(TARGET)" $(ARGS)

test: setup ## Run all tests that are not slow
	$(PY) -m pytest -m "not slow" -n 2 --dist loadfile --durations 40

slow: setup ## Run the slow tests: whole pipelines, large inputs, bundles, experiments, Dask
	$(PY) -m pytest -m slow -n 2 --dist loadfile

faults: setup ## Test the faults of a training (docs/reliability.md), at every step and every file
	$(PY) -m pytest -n 2 $(addprefix tests/test_,$(addsuffix .py,checkpoints resume launch faults nodes other_launchers shared_disk))

CYCLES ?= 200
random-faults: setup ## Interrupt `dvc repro` at random, run it to its end and compare the results; CYCLES=20 ARGS='--seed 1'
	$(PY) -m tests.random_faults --cycles $(CYCLES) $(ARGS)

fuzz: setup ## Fuzz all that reads a file of others, a minute each; ARGS='yaml --seconds 600'
	@$(PY) -m scripts.install 'atheris>=3'
	$(PY) -m tests.fuzz $(ARGS)

# requirements-cuda.lock has all packages of requirements-cpu.lock, whose torch+cpu no database of vulnerabilities knows.
AUDITED = requirements-cuda.lock requirements-encoder.lock requirements-score.lock

audit: setup ## Write outputs/sbom.json (CycloneDX) from the locks, and look up their vulnerabilities, with internet access
	@mkdir -p outputs
	cat $(AUDITED) | $(PY) -m uv tool run --from cyclonedx-bom cyclonedx-py requirements - --output-file outputs/sbom.json
	for lock in $(AUDITED); do \
		$(PY) -m uv tool run pip-audit --strict --disable-pip --require-hashes --requirement $$lock || exit; done

slurm: ## Install Slurm for the tests of slurm/, as root on Debian
	@scripts/debian_packages.sh sbatch slurm-wlm munge

slurm-test: setup slurm ## Test slurm/ on a Slurm cluster of two nodes, which starts and ends with the tests
	$(PY) -m pytest tests/slurm

nfs-test: setup ## Test trainings on NFS with two nodes, in a guest kernel; as root on Debian it installs what that needs
	@scripts/debian_packages.sh linux.uml user-mode-linux nfs-kernel-server kmod
	$(PY) -m tests.nfs

architectures: setup ## Take each architecture of transformers through the pipeline, and write docs/models.csv; ARGS=NAMES: these first
	$(PY) -m tests.architectures $(ARGS)

# Without `setup`, which may not be able to install anything there: it also runs with a torch that the machine provides.
gpu: ## Test and measure what needs a GPU, in at most 25 minutes; run it again to continue
	$(or $(wildcard $(PY)),python3) -m benchmarks.gpu $(ARGS)

# What they mostly lack beside torch, transformers and what these need: pydantic, which all stages need, and two packages
# of the data stages, which make the rows of the benchmark.
WHEELS = pydantic pydantic-core annotated-types typing-inspection typing-extensions msgspec python-jsonpath
PYTHON_VERSION ?= 3.12

gpu-wheels: setup ## Download into wheels/ what a GPU machine without a package index lacks; PYTHON_VERSION=3.12
	scripts/locked.sh requirements-cuda.lock $(WHEELS) | $(PY) -m pip download --quiet --require-hashes --no-deps --only-binary=:all: \
		--python-version $(PYTHON_VERSION) --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 --dest wheels --requirement /dev/stdin
	@echo "there: python3 -m pip install --no-index --no-deps --target site wheels/*.whl; export PYTHONPATH=\$$PWD/site"

versions: setup ## Run the tests with the lowest and the highest versions that pyproject.toml allows; ARGS=tests/test_loss.py
	scripts/versions.sh $(ARGS)

parameters: setup ## Write docs/parameters.md from params.yaml, dvc.yaml and the docstrings of the code
	$(PY) -m scripts.parameters

picture: ## Take docs/report.png, the picture of the README, of outputs/report, with Chromium
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,850 \
		--screenshot=docs/report.png "file://$(CURDIR)/outputs/report/report.html"

check: setup ## Check lint, format and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# $(1): torch version, $(2): lowest Python version. UPGRADE=--upgrade: newer versions than those already in the lock.
compile = $(PY) -m uv pip compile pyproject.toml - --extra dev --universal --python-version $(2) \
	--generate-hashes --no-annotate --custom-compile-command "make lock" --quiet $(UPGRADE) <<< torch==$(1)

lock: setup ## Write the locks from pyproject.toml, and those of the fast tokenizer and of lm-eval
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(call compile,2.13.0+cpu,3.11) --output-file requirements-cpu.lock
	$(call compile,2.13.0,3.10) --output-file requirements-cuda.lock
	$(PY) -m uv pip compile - --no-deps --universal --python-version 3.10 --generate-hashes --no-annotate \
		--custom-compile-command "make lock" --quiet --output-file requirements-encoder.lock \
		<<< tokenizers==$$($(PY) -c 'from stages.tokenizing import fast_tokenizer; print(fast_tokenizer.VERSION)')
	printf '%s\n' accelerate lxml portalocker sacrebleu \
		lm-eval==$$($(PY) -c 'from stages.scoring import packages; print(packages.VERSION)') | \
		$(PY) -m uv pip compile - --no-deps --universal --python-version 3.10 --generate-hashes --no-annotate \
		--custom-compile-command "make lock" --quiet $(UPGRADE) --output-file requirements-score.lock
