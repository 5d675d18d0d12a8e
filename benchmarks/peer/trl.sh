#!/usr/bin/env bash
# Installs TRL with PyTorch into build/trl-venv, with this tree and the packages of .venv behind its own, for the tests
# of rollouts. It downloads 3 GB and takes 6 GB of disk, so `make peers` does not run it. PYTHON names another
# environment than .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/trl-venv
python=${PYTHON:-.venv/bin/python}
versions=('trl==1.16.0' 'torch' 'gguf==0.19.0')

stamp="$venv/.installed"
[[ -f $stamp && $(<"$stamp") == "${versions[*]}" ]] && exit 0

echo "Installing ${versions[*]} into $venv, some minutes the first time" >&2
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${versions[@]}" >&2
own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
{ pwd && "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } >"$own/deckhands.pth"
echo "${versions[*]}" >"$stamp"
