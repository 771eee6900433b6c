#!/usr/bin/env bash
# The GPU tests, the benchmark, the other programs and the accuracy of each precision, in one command:
#
#     scripts/gpu_check.sh OUT [DEVICES] [FASTA...]
#
# OUT       folder for the results: one JSON a measurement, tests.txt, and the log of each step
# DEVICES   GPU indices such as 0,1 [0]; with several, scaling is measured too
# FASTA     what accuracy is judged on [examples/contigs.fa.gz]; give at least 10,000 open reading frames
#
# Only the core must be importable (torch, numpy, h5py, dnaio, xopen, tokenizers, safetensors) and pytest;
# programs to compare with are left out where they are not installed. PYTHON chooses the interpreter.
# A step that fails does not stop the others; the exit code says whether all of them passed.
set -uo pipefail

if [ $# -lt 1 ]; then
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd)
devices=${2:-0}
shift $(($# > 1 ? 2 : 1))
fasta=()
for file in "$@"; do
  fasta+=("$(realpath "$file")")
done
cd "$(dirname "$0")/.." || exit 1
[ ${#fasta[@]} -gt 0 ] || fasta=(examples/contigs.fa.gz)
python=${PYTHON:-python3}
first=${devices%%,*}
failed=()

step() {
  local name=$1
  shift
  printf '== %s: %s\n' "$name" "$*"
  if ! "$@" 2>&1 | tee "$out/$name.txt"; then
    failed+=("$name")
  fi
}

bench() {
  local name=$1
  shift
  step "$name" "$python" -m benchmarks.forward --out "$out/$name.json" "$@"
}

step tests scripts/gpu_tests.sh "$out"

forward=(--devices "$first" --precision fp16,bf16,fp8)
bench forward_650M "${forward[@]}" --model random:650M --lengths fixed:166,lognormal
bench forward_3B "${forward[@]}" --model random:3B --lengths fixed:166,lognormal
bench forward_dnabert_s "${forward[@]}" --model random:DNABERT-S --lengths fixed:500

whole=(--devices "$first" --precision fp16 --end-to-end 10)
bench end_to_end_8M "${whole[@]}" --model random:8M
bench end_to_end_650M "${whole[@]}" --model random:650M
bench end_to_end_3B "${whole[@]}" --model random:3B
bench end_to_end_dnabert_s "${whole[@]}" --model random:DNABERT-S
if [ "$devices" != "$first" ]; then
  bench scaling_3B --devices "$devices" --precision fp16 --end-to-end 20 --model random:3B
fi

step peers "$python" -m benchmarks.peers --device "$first" --out "$out/peers.json"
step accuracy "$python" -m benchmarks.accuracy "${fasta[@]}" --device "$first" --out "$out/accuracy.json"

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
