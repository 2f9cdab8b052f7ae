#!/bin/sh
# Generate the Python code of proto/ into client/ (or into $1, for the check that it is up to date),
# and the comments of the protos, which are the texts of REST's documents.
set -eu
out=${1:-client}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
descriptors=$(mktemp)
trap 'rm -f "$descriptors"' EXIT
"$python" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  --descriptor_set_out="$descriptors" --include_source_info proto/dialoop/v1/*.proto
"$python" infra/proto_comments.py "$descriptors" > "$out/dialoop/v1/comments.json"
