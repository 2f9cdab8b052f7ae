#!/bin/sh
# Generate the Python code of proto/ into client/ (or into $1, for the check that it is up to date),
# the comments of the protos, which are the texts of REST's documents, and the image of v1 that later
# protos may only add to: a change that breaks it is refused here. ANEW=1 makes the image anew; nobody may
# do that once v1 is released.
set -eu
out=${1:-client}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$out"
descriptors=$(mktemp)
trap 'rm -f "$descriptors"' EXIT
"$python" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  --descriptor_set_out="$descriptors" --include_source_info proto/dialoop/v1/*.proto
"$python" infra/proto_comments.py "$descriptors" > "$out/dialoop/v1/comments.json"
buf=$(dirname "$python")/buf
[ -n "${ANEW:-}" ] || "$buf" breaking proto --against proto/v1.binpb
image=proto/v1.binpb
[ "$out" = client ] || image=$out/v1.binpb
"$buf" build proto --exclude-source-info -o "$image"
