#!/usr/bin/env bash
# Install packages for tests that need a program, as root on Debian and where the packages can be had. Elsewhere it prints
# why not, and is no error: those tests are skipped there, with a message.
#
#   scripts/debian_packages.sh PROGRAM PACKAGE...
set -euo pipefail
program=$1
packages=("${@:2}")

without() {
    echo "$program: $1: the tests that need it are skipped" >&2
    exit
}

if [[ -n $(command -v "$program") ]]; then exit; fi
[[ -n $(command -v apt-get) ]] || without "not installed, and only on Debian this script can install it"
((EUID == 0)) || without "not installed, and only root can install it"
export DEBIAN_FRONTEND=noninteractive
# Fail fast without a network.
apt=(apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
echo "$program: installing ${packages[*]}"
"${apt[@]}" install --no-install-recommends "${packages[@]}" ||
    { "${apt[@]}" update && "${apt[@]}" install --no-install-recommends "${packages[@]}"; } ||
    without "apt-get cannot install ${packages[*]}, as shown above"
