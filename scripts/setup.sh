#!/usr/bin/env bash
# Install the lock that fits this machine into .venv: the CUDA build of torch if there is an NVIDIA GPU, the CPU build
# otherwise, and the other build if that one cannot be installed. Does nothing if the build is installed and its lock
# has not changed. pip reads its settings (index, directory of wheels, certificates) from PIP_* and its own config.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/.setup # the preferred build, the installed build, the digest of the lock of the installed one

fits=(cpu cuda)
if [[ -e /dev/nvidia0 ]] || nvidia-smi &> /dev/null; then fits=(cuda cpu); fi

digest() { sha256sum < "requirements-$1.lock" | cut -d' ' -f1; }

read -r wanted build installed 2> /dev/null < "$stamp" || true
# The CUDA build runs on CPUs as well: a CPU node that shares this directory with a GPU node keeps that node's build.
if [[ -n ${build:-} && $installed == "$(digest "$build")" && (${fits[0]} == cpu || $wanted == cuda) ]]; then exit; fi

[[ -x .venv/bin/python ]] || "${PYTHON:-python3}" -m venv .venv
for build in "${fits[@]}"; do
    echo "setup: installing requirements-$build.lock into .venv (some minutes)"
    rm -f "$stamp"
    # For pip, an installed torch 2.13.0+cpu satisfies the 2.13.0 of the other lock: without this it would stay.
    other=$(.venv/bin/python -m pip freeze | sed -n 's/^torch==.*+cpu$/cpu/p; s/^torch==[^+]*$/cuda/p')
    [[ ${other:-$build} == "$build" ]] || .venv/bin/python -m pip uninstall --quiet --yes torch
    if .venv/bin/python -m pip install -qq --require-hashes --requirement "requirements-$build.lock"; then
        echo "${fits[0]} $build $(digest "$build")" > "$stamp"
        echo "setup: installed the $build build of torch, from requirements-$build.lock"
        exit
    fi
    echo "setup: requirements-$build.lock cannot be installed here" >&2
done
echo "setup: neither build of torch could be installed; see CONTRIBUTING.md, \"Setting up\"" >&2
exit 1
