#!/usr/bin/env bash
# Installs verifiers into build/verifiers-venv, with this tree and the packages of .venv behind its own, for the tests of
# deckhands_verifiers. PYTHON names another environment than .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/verifiers-venv
python=${PYTHON:-.venv/bin/python}
versions=('verifiers~=0.4.0')

stamp="$venv/.installed"
[[ -f $stamp && $(<"$stamp") == "${versions[*]}" ]] && exit 0

echo "Installing ${versions[*]} into $venv, two minutes the first time" >&2
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${versions[@]}" >&2
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
{ pwd && "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } >"$own/deckhands.pth"
echo "${versions[*]}" >"$stamp"
