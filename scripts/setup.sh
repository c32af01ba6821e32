#!/usr/bin/env bash
# Install into .venv the lock that fits this machine: the CUDA build of torch where there is an NVIDIA GPU, else the CPU
# build; the other one where that cannot be had. Does nothing when that was done before and the lock is the same.
# pip takes its settings (index, wheel folder, certificates) from PIP_* and its own config, as always.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/.setup # the build that was wanted, the build that was installed, the digest of its lock

fits=(cpu cuda)
if [[ -e /dev/nvidia0 ]] || nvidia-smi &> /dev/null; then fits=(cuda cpu); fi

digest() { sha256sum < "requirements-$1.lock" | cut -d' ' -f1; }

read -r wanted build installed 2> /dev/null < "$stamp" || true
# The CUDA build runs on CPUs as well: a CPU node never takes it from the GPU node with which it shares this directory.
if [[ -n ${build:-} && $installed == "$(digest "$build")" && (${fits[0]} == cpu || $wanted == cuda) ]]; then exit; fi

[[ -x .venv/bin/python ]] || "${PYTHON:-python3}" -m venv .venv
for build in "${fits[@]}"; do
    echo "setup: installing requirements-$build.lock into .venv, which takes some minutes"
    rm -f "$stamp"
    # pip would take an installed torch 2.13.0+cpu for the 2.13.0 of the other lock.
    other=$(.venv/bin/python -m pip freeze | sed -n 's/^torch==.*+cpu$/cpu/p; s/^torch==[^+]*$/cuda/p')
    [[ ${other:-$build} == "$build" ]] || .venv/bin/python -m pip uninstall --quiet --yes torch
    if .venv/bin/python -m pip install -qq --require-hashes --requirement "requirements-$build.lock"; then
        echo "${fits[0]} $build $(digest "$build")" > "$stamp"
        echo "setup: installed the $build build of torch, from requirements-$build.lock"
        exit
    fi
    echo "setup: requirements-$build.lock cannot be installed here" >&2
done
echo "setup: neither build of torch can be had; see CONTRIBUTING.md, \"Setting up\"" >&2
exit 1
