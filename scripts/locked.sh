#!/usr/bin/env bash
# Print what a lock says of some packages, with their hashes: scripts/locked.sh requirements-cuda.lock torch numpy
set -euo pipefail
lock=$1
shift
# Each package begins at the left margin, its hashes are indented.
awk -v names=" $* " '/^[^ ]/ { keep = index(names, " " substr($0, 1, index($0, "==") - 1) " ") } keep' "$lock"
