#!/usr/bin/env bash
# Run the tests (ARGUMENTS: of pytest) with the lowest and with the highest versions that pyproject.toml allows, each in an
# environment of its own below outputs/.versions. The index has to have a torch for this machine in both versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv() { .venv/bin/python -m uv "$@"; }
status=0
for resolution in lowest-direct highest; do
    environment=$PWD/outputs/.versions/$resolution
    uv venv --quiet --seed --allow-existing --python .venv/bin/python "$environment"
    # setuptools first: it builds antlr4-python3-runtime (of dvc), which has no wheel.
    uv pip install --quiet --python "$environment" 'setuptools>=77'
    uv pip install --quiet --python "$environment" --resolution "$resolution" --upgrade --no-build-isolation \
        --extra dev --extra adamw_8bit --extra wandb --requirement pyproject.toml
    export PATH="$environment/bin:$PATH"
    python -m scripts.install_encoder
    echo "versions: $resolution: $(python -c 'import torch, transformers; print(torch.__version__, transformers.__version__)')"
    # What other versions of packages say of each other is no error of ours.
    python -m pytest -m "not slow" -n 2 --dist worksteal -W ignore::DeprecationWarning \
        -W ignore::pytest.PytestUnraisableExceptionWarning "$@" || status=1
done
exit $status
