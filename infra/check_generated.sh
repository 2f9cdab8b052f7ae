#!/bin/sh
# Fail unless client/dialoop/v1 is what proto/ generates today.
set -eu
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
infra/generate_protos.sh "$fresh"
if ! diff -r --exclude=__pycache__ --exclude=__init__.py "$fresh/dialoop/v1" client/dialoop/v1; then
  echo "client/dialoop/v1 is not what proto/ generates: run \`make proto\` and commit the result." >&2
  exit 1
fi
