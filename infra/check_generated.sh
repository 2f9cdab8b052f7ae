#!/bin/sh
# Fail unless client/dialoop/v1, the image of v1 and the types of blocking clients are generated.
set -eu
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
infra/generate_protos.sh "$fresh"
if ! diff -r --exclude=__pycache__ --exclude=__init__.py "$fresh/dialoop/v1" client/dialoop/v1; then
  echo "client/dialoop/v1 is not what proto/ generates: run \`make proto\` and commit the result." >&2
  exit 1
fi
if ! cmp -s "$fresh/v1.binpb" proto/v1.binpb; then
  echo "proto/v1.binpb is not the image of proto/: run \`make proto\` and commit the result." >&2
  exit 1
fi
twins=client/dialoop/clients/blocking/twins.pyi
.venv/bin/python infra/generate_blocking.py "$fresh/twins.pyi"
if ! diff "$fresh/twins.pyi" "$twins"; then
  echo "$twins is not what the clients say: run \`make proto\` and commit the result." >&2
  exit 1
fi
