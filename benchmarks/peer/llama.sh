#!/usr/bin/env bash
# Installs llama.cpp's server and the writer of its model files into build/llama-venv, for the tests of rollouts.
# PEER_PYTHON names the Python to use.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/llama-venv
# xllamacpp has llama.cpp's own HTTP server, compiled; llama-cpp-python would compile for a quarter of an hour.
versions=('xllamacpp==2026.10.11549' 'gguf==0.19.0' 'tokenizers==0.23.3')

stamp="$venv/.installed"
[[ -f $stamp && $(<"$stamp") == "${versions[*]}" ]] && exit 0

echo "Installing ${versions[*]} into $venv" >&2
"${PEER_PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${versions[@]}" >&2
echo "${versions[*]}" >"$stamp"
