#!/usr/bin/env bash
# Tests against packages that do not fit beside our pins: each in a venv of its own over .venv.
#   infra/test_compat.sh                all of them, in ${TMPDIR:-/tmp}/dialoop-compat
#   infra/test_compat.sh openenv        one of them
#   infra/test_compat.sh peers          losses against TRL's and torchrl's own code
#   infra/test_compat.sh ifeval         IFEval's checks against lm-eval's; llama-index has nltk's data
set -euo pipefail
cd "$(dirname "$0")/.."

place="${TMPDIR:-/tmp}/dialoop-compat"
declare -A packages=(
  [openenv]="openenv-core>=0.3,<0.4"
  [torchrl]="torchrl>=0.14,<0.15"
  [verifiers]="verifiers>=0.4,<0.5"
  [peers]="trl>=1.16,<1.17 torchrl>=0.14,<0.15"
  [ifeval]="--no-deps lm-eval>=0.4.13,<0.5 nltk>=3.10,<3.11 immutabledict>=4,<5 joblib>=1.5,<2 llama-index-core>=0.14,<0.15"
)
for name in "${@:-openenv torchrl verifiers peers ifeval}"; do
  for one in $name; do
    venv="$place/$one"
    read -ra wanted <<< "${packages[$one]}"
    if [[ ! -x "$venv/bin/python" ]]; then
      .venv/bin/python -m venv --without-pip "$venv"
      site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
      ours=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
      echo "import site; site.addsitedir('$ours')" > "$site/ours.pth"
    fi
    .venv/bin/python -m pip --python "$venv/bin/python" install -q "${wanted[@]}"
    if [[ "$one" == peers ]]; then
      tests=(tests/contract/compat/test_peers.py tests/parity/learning/test_peers*.py)
    elif [[ "$one" == ifeval ]]; then
      tests=(tests/contract/compat/test_ifeval.py)
    else
      tests=(tests/extras/contract/compat/test_"$one"*.py)
    fi
    [[ "$one" == torchrl ]] && tests+=(tests/extras/unit/views/test_tensors.py)
    "$venv/bin/python" -m pytest -p no:cacheprovider "${tests[@]}"
  done
done
