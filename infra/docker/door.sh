#!/usr/bin/env bash
# Relay TCP connections between two networks: LISTEN_PORT=HOST:PORT for each way through.
#
#   door.sh 7001=environment:7001 8001=environment:8001 7002=inference:7002
#
# A name is looked up at each connection, so that a container may come back under another address. If one
# relay ends, all do, and the container starts again.
set -euo pipefail

for way in "$@"; do
  socat -t 60 "TCP-LISTEN:${way%%=*},fork,reuseaddr,max-children=1024" "TCP:${way#*=},connect-timeout=5" &
done
wait -n || true
exit 1
