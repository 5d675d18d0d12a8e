#!/usr/bin/env bash
# Installs inspect_ai into build/inspect-venv, for `eval_crowd` alone; PEER_PYTHON names the Python to use.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/inspect-venv
versions=(inspect-ai openai)

stamp="$venv/.installed"
[[ -f $stamp && $(<"$stamp") == "${versions[*]}" ]] && exit 0

"${PEER_PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${versions[@]}" >&2
echo "${versions[*]}" >"$stamp"
