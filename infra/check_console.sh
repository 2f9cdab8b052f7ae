#!/bin/sh
# Build the console's page anew and compare it with the one that is committed; needs npm.
set -eu
cd "$(dirname "$0")/.."
page=services/dialoop_ops/console/page

if ! command -v npm >/dev/null 2>&1; then
  echo "check_console: no npm is here, so the console's page was NOT compared with its sources."
  exit 0
fi
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
mkdir -p "$made/services/dialoop_ops/console"
cp -r console "$made/console"
if ! (cd "$made/console" && npm ci --silent --no-audit --no-fund) >/dev/null 2>&1; then
  echo "check_console: npm could not install, so the console's page was NOT compared."
  exit 0
fi
(cd "$made/console" && npm run --silent build >/dev/null)
diff -r "$made/$page" "$page" || {
  echo "check_console: the page differs from its sources; run \`make console\`." >&2
  exit 1
}
