#!/usr/bin/env bash
# Install the lock that fits this machine into .venv: the CUDA build of torch if there is an NVIDIA GPU, the CPU build
# otherwise, and the other build if that one is not available. Does nothing if the build is installed and its lock has
# not changed. The settings of pip (index, directory of wheels, certificates) apply: PIP_* and its own config.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/.setup # the preferred build, the installed build, the digest of the lock of the installed one
python=.venv/bin/python

fits=(cpu cuda)
if [[ -e /dev/nvidia0 ]] || nvidia-smi &> /dev/null; then fits=(cuda cpu); fi

digest() { cat "requirements-$1.lock" requirements-encoder.lock | sha256sum | cut -d' ' -f1; }

locked() { scripts/locked.sh "requirements-$build.lock" "$@"; }

fail() {
    echo "setup: requirements-$build.lock cannot be installed: the error above names what is missing;" \
        'see CONTRIBUTING.md, "Set up"' >&2
    exit 1
}

if [[ -e .venv/bin/dvc && ! -x $(sed -n '1s/^#!\(\S*\).*/\1/p' .venv/bin/dvc) ]]; then
    echo 'setup: the programs in .venv start a Python that is not here, as after the project was moved: `rm -r .venv`,' \
        'then `make setup`' >&2
    exit 1
fi

read -r wanted present installed 2> /dev/null < "$stamp" || true
is_current() { [[ ${present:-} == "$1" && $installed == "$(digest "$1")" ]]; }

# The CUDA build runs on CPUs as well: nodes with and without GPU that share this directory keep it, whichever of them
# has installed it. The CPU build stays on a GPU node where the CUDA build was not available.
if is_current cuda || { is_current cpu && [[ ${fits[0]} == cpu || $wanted == cuda ]]; }; then exit; fi

$python -m pip --version &> /dev/null || "${PYTHON:-python3}" -m venv .venv # also where it was begun and has no pip
rm -f "$stamp"
for build in "${fits[@]}"; do
    if is_current "$build"; then # the build that fits better could not be installed, so nothing was replaced
        echo "${fits[0]} $build $installed" > "$stamp"
        exit
    fi
    echo "setup: installing requirements-$build.lock into .venv"
    # uv installs all others. setuptools builds antlr4-python3-runtime (of dvc), which has no wheel: with build isolation,
    # a setuptools that is not in the lock would be fetched for it, which fails offline.
    locked uv setuptools | $python -m pip install -qq --require-hashes --no-deps --requirement /dev/stdin || fail
    # torch alone decides which build: another missing package is missing for both. Forced, because an installed
    # 2.13.0+cpu satisfies the 2.13.0 of the other lock.
    if ! locked torch | $python -m scripts.install --require-hashes --no-deps --force-reinstall --requirement /dev/stdin; then
        echo "setup: the $build build of torch cannot be installed here" >&2
        continue
    fi
    $python -m scripts.install --require-hashes --no-build-isolation --requirement "requirements-$build.lock" || fail
    $python -m scripts.install_encoder ||
        echo "setup: requirements-encoder.lock cannot be installed: set fast_encoder: false in params.yaml" >&2
    echo "${fits[0]} $build $(digest "$build")" > "$stamp"
    echo "setup: installed the $build build of torch, from requirements-$build.lock"
    exit
done
echo 'setup: neither build of torch could be installed; see CONTRIBUTING.md, "Set up"' >&2
exit 1
