#!/usr/bin/env bash
# Installs DBOS into build/dbos-venv, for `front_door` alone; PEER_PYTHON names the Python to use. Its PostgreSQL is
# Debian's: `apt-get install postgresql`.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=build/dbos-venv
versions=(dbos)

compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || { echo 'no PostgreSQL: apt-get install postgresql' >&2; exit 1; }
stamp="$venv/.installed"
[[ -f $stamp && $(<"$stamp") == "${versions[*]}" ]] && exit 0

"${PEER_PYTHON:-python3}" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${versions[@]}" >&2
echo "${versions[*]}" >"$stamp"
