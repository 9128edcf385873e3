#!/usr/bin/env bash
# What a GPU machine is asked for: the ops' tests on CUDA, the native tests under compute-sanitizer, random calls,
# thousands of requests through the driver, the benchmarks.
# usage: tools/gpu_suite.sh [tests] [sanitizer] [fuzz] [soak] [bench]     (all by default; each takes under 9 minutes)
#
# Needs a built tree and pytest, hypothesis, rich, matplotlib. Logs and results go to
# OUT/<GPU name>/ (default benchmarks/results), a line of JSON per part to suite.jsonl there.
# PYTHON: the interpreter. PYTEST_ARGS: more arguments of pytest. SANITIZER_ARGS: of tests/native/ops_test.cpp, such as
# "--op verify"; SANITIZER_SECONDS: the limit of each sanitizer, which take some 30, racecheck 90. VEGAS_OPS_KERNELS goes to
# all that runs.
# FUZZ_CASES, SOAK_REQUESTS: how many (50,000 and 20,000).
# BENCH_SECONDS: budget of the three benchmarks together. FlashAttention-3 joins them if VEGAS_BENCH_FA3
# names its library or an xz of it lies in .carry/.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# By name: to collect others takes packages that they need.
tests=(tests/cases/test_{attention,driver,gpu,memory,selection}_cases.py)
for name in verify verify_large select sparse arguments value_checks fuzz workspaces hostile_data threads loop graphs \
  unread bookkeeping fused sampling_kernels page_scores layer_attention transformers transformers_half; do
  tests+=("tests/test_$name.py")
done

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit --format=csv || exit 1
"$python" - <<'PYTHON' || exit 1
import sys, torch, vegas_ops
from vegas_ops import _C
print("python", sys.version.split()[0], "torch", torch.__version__, "vegas_ops", vegas_ops.__version__)
print("kernels for", _C.cuda_architectures() or "no GPU")
assert torch.cuda.is_available(), "torch sees no GPU"
assert _C.cuda_architectures(), "this build has no CUDA kernels"
PYTHON
facts=$(PYTHONPATH=benchmarks:$PYTHONPATH "$python" -c '
import report, torch
name = torch.cuda.get_device_name()
print(report.sources_hash(), report.slug(name), name)') || exit 1
read -r sources slug gpu <<<"$facts"
out=${OUT:-benchmarks/results}
logs=$out/$slug
mkdir -p "$logs"
status=0

# record PART RC KEY VALUE [KEY VALUE]...: one line of suite.jsonl, also shown
record() {
  [ "$2" -eq 0 ] || status=1
  "$python" - "$sources" "$gpu" "$@" <<'PYTHON' | tee -a "$logs/suite.jsonl"
import datetime, json, sys
sources, gpu, part, rc, *pairs = sys.argv[1:]
now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
facts = dict(zip(pairs[::2], pairs[1::2]))
print(json.dumps({"part": part, "sources": sources, "gpu": gpu, "date": now, "rc": int(rc), **facts}))
PYTHON
}

pytest_summary() { grep -aE '[0-9]+ [a-z]+ in [0-9.]+s' "$1" | tail -1 | tr -d '='; }

run_tests() {
  # Tests with a device run once per device; those on the CPU are not marked, and not this script's affair.
  timeout -k 10 510 "$python" -m pytest -q -rs -p no:cacheprovider --timeout=240 -m gpu "${tests[@]}" \
    ${PYTEST_ARGS:-} 2>&1 | tee "$logs/tests.log"
  local rc=${PIPESTATUS[0]}
  record tests "$rc" pytest "$(pytest_summary "$logs/tests.log")"
}

run_sanitizer() {
  local folder program kernels=${VEGAS_OPS_KERNELS:-default} tools=(memcheck racecheck initcheck synccheck) tool rc
  folder=$(mktemp -d)
  program=$folder/ops_test
  # Each tensor of this program is an allocation of its own: a framework's allocator would hide overruns, and
  # importing one under a sanitizer takes longer than all the cases.
  tests/native/build.sh vegas_ops/libvegas.so "$program" cuda 2>&1 | tee "$logs/native.log"
  rc=${PIPESTATUS[0]}
  if [ "$rc" -eq 0 ]; then
    timeout -k 10 120 "$program" --device cuda 2>&1 | tee "$logs/native.log"
    rc=${PIPESTATUS[0]}
  fi
  record native "$rc" kernels "$kernels" cases "$(tail -n 1 "$logs/native.log")"
  [ "$rc" -eq 0 ] || return
  # Side by side: they leave the GPU idle most of the time.
  for tool in "${tools[@]}"; do
    (
      # What is not displayed hides behind what is: hazards of one kernel behind those of another.
      options=(--tool "$tool" --error-exitcode 9 --print-limit 10000)
      read -ra arguments <<<"${SANITIZER_ARGS:-}"
      # Nothing then lies right behind an allocation, where an overrun would pass for an access to the next.
      [ "$tool" != memcheck ] || options+=(--padding 4096)
      timeout -k 10 "${SANITIZER_SECONDS:-240}" compute-sanitizer "${options[@]}" "$program" --device cuda \
        "${arguments[@]}" >"$logs/$tool.log" 2>&1
      echo $? >"$folder/$tool.rc"
    ) &
  done
  wait
  for tool in "${tools[@]}"; do
    rc=$(cat "$folder/$tool.rc")
    tail -n 8 "$logs/$tool.log"
    record "$tool" "$rc" kernels "$kernels" cases "$(grep -aE '^[0-9]+ cases, ' "$logs/$tool.log" | tail -1)" \
      last "$(grep -aE '^(ok|FAIL) ' "$logs/$tool.log" | tail -1 | tr -s ' ')" \
      sanitizer "$(grep -aE 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$tool.log" | tail -1)"
  done
  rm -r "$folder"
}

run_fuzz() {
  timeout -k 10 520 "$python" tools/fuzz.py --device cuda --cases "${FUZZ_CASES:-50000}" 2>&1 | tee "$logs/fuzz.log"
  local rc=${PIPESTATUS[0]}
  record fuzz "$rc" kernels "${VEGAS_OPS_KERNELS:-default}" result "$(grep -aE '^[0-9]+ cases \(' "$logs/fuzz.log" | tail -1)"
}

run_soak() {
  timeout -k 10 520 "$python" tools/soak.py --device cuda --requests "${SOAK_REQUESTS:-20000}" 2>&1 | tee "$logs/soak.log"
  local rc=${PIPESTATUS[0]}
  record soak "$rc" result "$(grep -aE '^[0-9]+ requests ended' "$logs/soak.log" | tail -1)" \
    memory "$(grep -aE ' after a quarter, ' "$logs/soak.log" | tr '\n' ';')"
}

find_fa3() {
  [ -z "${VEGAS_BENCH_FA3:-}" ] && [ -f .carry/fa3.so.xz ] || return 0
  local folder
  folder=$(mktemp -d)
  "$python" -c '
import lzma, shutil, sys
with lzma.open(sys.argv[1]) as packed, open(sys.argv[2], "wb") as library:
    shutil.copyfileobj(packed, library)' .carry/fa3.so.xz "$folder/_vllm_fa3_C.abi3.so" &&
    export VEGAS_BENCH_FA3=$folder/_vllm_fa3_C.abi3.so VEGAS_BENCH_FA3_VERSION="${VEGAS_BENCH_FA3_VERSION:-vllm 0.24.0 wheel}"
}

run_bench() {
  find_fa3
  local total=${BENCH_SECONDS:-420} name seconds rc
  for name in verify sparse selection; do
    seconds=$((total / 4))
    [ "$name" != verify ] || seconds=$((total / 2))
    timeout -k 10 $((seconds + 40)) "$python" "benchmarks/$name.py" --record --device cuda --seconds "$seconds" --out "$out" \
      2>&1 | tee "$logs/bench-$name.log"
    rc=${PIPESTATUS[0]}
    record "bench $name" "$rc" seconds "$seconds"
  done
}

for part in "${@:-tests sanitizer fuzz soak bench}"; do
  for name in $part; do
    case $name in
      tests | sanitizer | fuzz | soak | bench) "run_$name" ;;
      *) echo "part must be tests, sanitizer, fuzz, soak or bench, got $name" >&2; exit 2 ;;
    esac
  done
done
exit "$status"
