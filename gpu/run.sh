#!/bin/sh
# On a GPU machine: install what it lacks from carried wheels (.whl/), run the gpu-marked tests, then
# time steps of whole models, then every kernel. Results go to $OUT (default: out/). Each part has a
# limit of its own, so that one that hangs costs no other.
# Wheels that were wanting there: gguf, msgspec, pyzmq.
#   gpu/run.sh [arguments of bench/kernels.py]
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-out}
mkdir -p "$OUT"
if [ -d .whl ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target /tmp/site .whl/*.whl || exit 1
  export PYTHONPATH=src:tests:/tmp/site
else
  export PYTHONPATH=src:tests
fi
export PYTHONUNBUFFERED=1

# A machine without one of the plugins that pyproject.toml sets options of would refuse to begin.
timeout 300 python3 -m pytest -m gpu -n 8 -p no:benchmark -W ignore::pytest.PytestConfigWarning \
  tests/ops tests/models tests/worker 2>&1 | tee "$OUT/tests.log"

steps() {
  timeout 120 python3 -m detour bench offline --load-format dummy "$@" 2>&1
}
{
  steps --model bench/llama31-8b-shape.json --batch 1 8 64 256 --context 1024 --prompts --profile
  steps --model bench/llama31-8b-shape.json --batch 1 64 --context 1024 --sampling top-p
  steps --model bench/llama31-8b-shape.json --batch 1 64 --context 1024 --disable-cuda-graph
  steps --model bench/glm5-tp8-slice.json --batch 1 8 64 256 512 --kv-cache-dtype fp8 \
    --simulate-routing uniform --prompts --profile
} | tee "$OUT/steps.txt"

for part in 0 1 2 3 4 5 6 7; do
  timeout 200 python3 bench/kernels.py --warm "$part/8" "$@" >"$OUT/warm.$part.log" 2>&1 &
done
wait
timeout 300 python3 bench/kernels.py --json "$OUT/kernels.json" "$@" 2>"$OUT/kernels.err" \
  | tee "$OUT/kernels.txt"
