#!/usr/bin/env bash
# Installs OpenHands' SDK into build/peer-venv, for the benchmarks alone. It needs Python 3.12 (3.13.0 deadlocks in one
# of its dependencies); PEER_PYTHON names one that is not on the PATH.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/peer-venv
versions=('openhands-sdk~=1.58.0' 'openhands-tools~=1.58.0' 'openhands-agent-server~=1.58.0')

stamp="$venv/.installed"
[[ -f $stamp && $(<"$stamp") == "${versions[*]}" ]] && exit 0

for python in "${PEER_PYTHON:-}" python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python; do
    "$python" -c '' 2>/dev/null && break # a version manager's name for it may lead nowhere
    python=
done
if [[ -z $python ]]; then
    echo 'no Python 3.12: install one, or name it by PEER_PYTHON=…' >&2
    exit 1
fi
echo "Installing ${versions[*]} into $venv, two minutes the first time" >&2
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${versions[@]}" >&2
echo "${versions[*]}" >"$stamp"
