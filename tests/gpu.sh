#!/usr/bin/env bash
# Runs what needs a GPU, within ten minutes: tests/gpu.sh [--quick | --sanitizer]
#
#   (nothing)     tests/multirank and tests/misuse on the cuda backend, then tests/cuda
#   --quick       some of both, within two minutes
#   --sanitizer   compute-sanitizer on a small case; racecheck, and two ranks as threads, are reported and not judged
#
# Three lanes run side by side. Two have ranks that are threads, with CUDA_DEVICE_MAX_CONNECTIONS=32: streams that share
# a connection wait for each other. The third has ranks that are processes, under an MPS daemon of this script's own
# where they share a GPU, and without that variable, which under MPS exhausts the GPU's channels. What looks at free
# memory or at times follows alone (marked so), and what kills a process when MPS has ended (no_mps). The tests choose
# their lane by name: those with "mpi" or "process" in it start processes that wait for each other.
#
# PYTHON names the interpreter (default: the checkout's .venv, else python3), SECONDS_AT_MOST another limit. The last
# line has the counts; the exit status is 0 if all was run and nothing failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec < /dev/null

mode=${1:-}
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
work=$(mktemp -d /tmp/cupyep-gpu.XXXXXX)
deadline=${SECONDS_AT_MOST:-585}  # of this script
export PATH=$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export CUDA_MPS_PIPE_DIRECTORY=$work/no-mps CUDA_MPS_LOG_DIRECTORY=$work/mps-log
unset CUDA_DEVICE_MAX_CONNECTIONS
export CUPYEP_EXAMPLES=${CUPYEP_EXAMPLES:-15}  # of each property: the lanes wait for each other's time on the GPU

finish() {
  local passed failed skipped
  kill $(jobs -p) 2> /dev/null
  stop_mps
  read -r passed failed skipped < <(counts "$work"/*.xml)
  passed=$((passed + $(lines passes))) failed=$((failed + $(lines failures)))
  [[ -f $work/failures ]] && cat "$work/failures"
  rm -rf "$work"
  echo "gpu.sh: $passed passed, $failed failed, $skipped skipped"
  exit $((failed > 0 || passed == 0))
}
trap finish EXIT
trap 'fail interrupted; exit' INT TERM

lines() { if [[ -f $work/$1 ]]; then wc -l < "$work/$1"; else echo 0; fi; }

fail() { echo "gpu.sh: $*" >> "$work/failures"; }

# counts FILES...: "passed failed skipped" of pytest's XML reports
counts() {
  "$python" - "$@" << 'PY'
import sys
import xml.etree.ElementTree as tree

passed = failed = skipped = 0
for path in sys.argv[1:]:
    try:
        suite = tree.parse(path).getroot().find("testsuite")
    except (OSError, tree.ParseError):
        continue  # of a run that was cut off: that is a failure already
    total, failures, errors, missed = (int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped"))
    passed, failed, skipped = passed + total - failures - errors - missed, failed + failures + errors, skipped + missed
print(passed, failed, skipped)
PY
}

# run SECONDS ARGUMENTS...: pytest within a time. A run that does not end by itself is a failure more.
run() {
  local limit=$1 left=$((deadline - SECONDS)) status
  shift
  ((limit = left < limit ? left : limit))
  if ((limit < 10)); then
    fail "no time left for: pytest $*"
    return
  fi
  echo "--- pytest $*"
  timeout --signal=INT --kill-after=15 "$limit" "$python" -m pytest -p no:cacheprovider --backend=cuda --timeout=120 \
    -ra --tb=short --durations=8 --junitxml="$(mktemp -u "$work/XXXXXX.xml")" "$@"
  status=$?
  ((status < 2)) || fail "pytest $*: exit status $status"
}

start_mps() {
  (($(nvidia-smi -L | wc -l) < 8)) || return 0  # a GPU for each rank of the largest test
  export CUDA_MPS_PIPE_DIRECTORY=$work/mps
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  timeout 20 nvidia-cuda-mps-control -d || fail "nvidia-cuda-mps-control does not start"
}

stop_mps() {
  local pid
  [[ -d $work/mps ]] || return 0
  pid=$(cat "$work/mps/nvidia-cuda-mps-control.pid" 2> /dev/null)
  CUDA_MPS_PIPE_DIRECTORY=$work/mps timeout 20 nvidia-cuda-mps-control <<< quit
  for _ in {1..50}; do
    [[ -n $pid ]] && kill -0 "$pid" 2> /dev/null || break
    sleep 0.1
  done
  [[ -n $pid ]] && kill "$pid" 2> /dev/null
  rm -rf "$work/mps"
  export CUDA_MPS_PIPE_DIRECTORY=$work/no-mps
}

# sanitize TOOL NUM_RANKS [report]: the case under one tool; with "report", its errors are shown and not counted.
sanitize() {
  local log=$work/sanitizer.log status
  echo "--- compute-sanitizer --tool $1, $2 ranks"
  CUDA_DEVICE_MAX_CONNECTIONS=32 timeout --kill-after=5 110 compute-sanitizer --tool "$1" --error-exitcode 9 \
    "$python" tests/cuda/sanitizer_case.py "$2" > "$log" 2>&1
  status=$?
  tail -n 25 "$log"
  if grep -q "Device not supported" "$log"; then
    fail "compute-sanitizer does not work on this machine"
  elif [[ ${3:-} == report ]]; then
    echo "gpu.sh: $1 with $2 ranks ended with exit status $status (report only)"
  elif ((status == 0)); then
    echo "$1" >> "$work/passes"
  else
    fail "$1 with $2 ranks: exit status $status"
  fi
}

threads="not (mpi or process)" processes="mpi or process"
tma=(tests/cuda/test_tma_*.py)
cuda=(tests/cuda --ignore=tests/cuda/test_compile.py)  # which needs no GPU

nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader
if ! "$python" -c 'import cupy; print("CuPy", cupy.__version__, "GPUs:", cupy.cuda.runtime.getDeviceCount())'; then
  fail "CuPy finds no GPU"
  exit
fi
if [[ $mode != --sanitizer ]]; then
  timeout 90 "$python" tests/cuda/precompile.py || echo "gpu.sh: kernels will be compiled as they come"
fi
case $mode in
  "")
    CUDA_DEVICE_MAX_CONNECTIONS=32 run 500 tests/multirank tests/misuse "${tma[@]}" -k "$threads" -m "not alone" > "$work/threads.log" 2>&1 &
    lanes=($!)
    CUDA_DEVICE_MAX_CONNECTIONS=32 run 500 "${cuda[@]}" --ignore-glob='*/test_tma_*' -k "$threads" -m "not alone" > "$work/cuda.log" 2>&1 &
    lanes+=($!)
    while sleep 3; do nvidia-smi --query-gpu=memory.used --format=csv,noheader; done > "$work/memory.log" &
    start_mps
    run 450 tests/multirank tests/misuse -k "$processes"
    run 400 "${cuda[@]}" -k "$processes" -m "not (no_mps or alone)"
    wait "${lanes[@]}"
    cat "$work/threads.log" "$work/cuda.log"
    echo "--- most memory in use: $(sort -n "$work/memory.log" | tail -n 1)"
    run 100 "${cuda[@]}" -k "$processes" -m alone
    stop_mps
    run 60 "${cuda[@]}" -m no_mps
    CUDA_DEVICE_MAX_CONNECTIONS=32 run 100 "${cuda[@]}" -k "$threads" -m alone
    ;;
  --quick)
    deadline=115
    CUDA_DEVICE_MAX_CONNECTIONS=32 run 60 tests/multirank/test_dispatch_combine.py::test_threads_share_one_buffer[{2,4}] \
      tests/cuda/test_streams.py tests/cuda/test_refusals.py -k "$threads"
    start_mps
    run 55 "tests/multirank/test_dispatch_combine.py::test_processes[2-True]" tests/cuda/test_refusals.py \
      "tests/cuda/test_failures.py::test_a_rank_that_stalls[mpi-gpu]" -k "$processes"
    ;;
  --sanitizer)
    for ranks in 1 2; do  # compiles, too
      CUDA_DEVICE_MAX_CONNECTIONS=32 timeout 70 "$python" tests/cuda/sanitizer_case.py $ranks || fail "the case itself fails"
    done
    sanitize memcheck 1
    sanitize synccheck 1
    sanitize racecheck 1 report
    sanitize memcheck 2 report
    ;;
  *)
    fail "expected --quick, --sanitizer or nothing, got $mode"
    ;;
esac
