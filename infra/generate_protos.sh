#!/bin/sh
# Generate the Python code of proto/ into client/ (or into $1, for the check that it is up to date).
set -eu
out=${1:-client}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
"$python" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  proto/dialoop/v1/*.proto
