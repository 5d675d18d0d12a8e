#!/bin/sh
# Installs valkey-glide into build/glide-venv, unless it is there.
set -e
cd "$(dirname "$0")/../.."
VENV=build/glide-venv
test -x $VENV/bin/python || python3 -m venv $VENV
$VENV/bin/python -c 'import glide' 2>/dev/null || $VENV/bin/pip install -q --disable-pip-version-check "valkey-glide>=2,<3"
