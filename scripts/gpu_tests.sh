#!/usr/bin/env bash
# The GPU tests in three processes side by side, since most of their time is compiling and starting lanes:
#
#     scripts/gpu_tests.sh OUT [SECONDS]
#
# OUT       folder for the logs, a line a test, with the time of day: tests_engine.txt, tests_models.txt, tests_kernels.txt
# SECONDS   after which what still runs is ended [1200]
#
# Needs the core alone and pytest; PYTHON chooses the interpreter. The exit code says whether all of them passed.
set -uo pipefail

if [ $# -lt 1 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
mkdir -p "$1" || exit 1
out=$(cd "$1" && pwd)
limit=${2:-1200}
cd "$(dirname "$0")/.." || exit 1
threads=$((($(nproc) + 2) / 3))

# The tests' own configuration and conftest want the whole of virnuc; these need neither.
part() {
  local name=$1
  shift
  OMP_NUM_THREADS=$threads PYTHONUNBUFFERED=1 timeout "$limit" "${PYTHON:-python3}" -m pytest --noconftest -c /dev/null --rootdir . \
    -p no:cacheprovider --import-mode=importlib -v -ra --tb=short -W ignore::pytest.PytestUnknownMarkWarning \
    -o faulthandler_timeout=120 -m gpu "$@" 2>&1 |
    while IFS= read -r line; do printf '%(%T)T %s\n' -1 "$line"; done >"$out/tests_$name.txt"
}

# Tests of memory stay together, one after another.
part engine tests/gpu/test_engine.py tests/gpu/test_resident.py tests/gpu/test_lanes.py tests/gpu/test_device.py &
engine=$!
part models tests/gpu/test_models.py tests/gpu/test_doctor.py tests/gpu/test_batch_mates.py &
models=$!
part kernels tests/unit/models/kernels/test_kernels.py tests/unit/models/kernels/test_products.py &
kernels=$!

failed=0
for process in "$engine" "$models" "$kernels"; do
  wait "$process" || failed=1
done
for name in engine models kernels; do
  grep -E ' (FAILED|ERROR)' "$out/tests_$name.txt"
  tail -n 1 "$out/tests_$name.txt"
done
exit $failed
