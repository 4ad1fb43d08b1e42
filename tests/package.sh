#!/usr/bin/env bash
# Built, installed with all its dependencies into an empty environment of every interpreter named, and tried out there:
# tests/package.sh PYTHON-WITH-HATCHLING INTERPRETER...
set -euo pipefail
cd "$(dirname "$0")/.."
builder=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$builder" -m hatchling build --target sdist --directory "$folder"
for interpreter in "$@"; do
    if ! command -v "$interpreter" >/dev/null; then
        echo "== $interpreter is not here, skipped"
        continue
    fi
    echo "== $("$interpreter" --version)"
    "$interpreter" -m venv "$folder/venv"
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
        "$(echo "$folder"/cpnorm-*.tar.gz)[lab,onnx]"
    "$folder/venv/bin/python" -I tests/smoke.py
    rm -rf "$folder/venv"
done
