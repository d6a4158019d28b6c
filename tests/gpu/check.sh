#!/usr/bin/env bash
# Checks the CUDA backend on a machine with a GPU: builds, runs everything, and prints a table last.
#
#   tests/gpu/check.sh [--bin DIR] [--out DIR] [STAGE...]
#
#   --bin DIR  take gpu_check and, if it is there, sageattn from DIR instead of building them
#   --out DIR  where logs, the build and the kernel cache go (default: build/gpu)
#
# Stages, all by default: selftest checks grid shapes large memcheck racecheck synccheck. The last
# three run a few small problems for every kind of kernel under compute-sanitizer; `large` needs some
# 30 GB of GPU memory. Building takes a C++20 compiler and CMake; nothing is downloaded. JOBS=n: compile jobs.
# Exits with 0 if nothing failed, 77 if there is no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

bin="" out=build/gpu stages=()
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=${2:?--bin: a folder is missing}; shift 2 ;;
    --out) out=${2:?--out: a folder is missing}; shift 2 ;;
    selftest | checks | grid | shapes | large | memcheck | racecheck | synccheck) stages+=("$1"); shift ;;
    *) echo "check.sh: unknown argument '$1'" >&2; exit 2 ;;
  esac
done
[ ${#stages[@]} -gt 0 ] || stages=(selftest checks grid shapes large memcheck racecheck synccheck)
mkdir -p "$out"
# One cache for all, so that the slow tools compile nothing.
export SAGEATTN_CACHE_DIR=${SAGEATTN_CACHE_DIR:-$PWD/$out/cache}

rows=() failed=0

# row NAME RESULT SECONDS SUMMARY
row() {
  rows+=("$(printf '%-10s %-8s %5d s  %s' "$1" "$2" "$3" "$4")")
  echo "${rows[-1]}"
  [ "$2" != FAILED ] || failed=1
}

build() {
  local options=(-DSAGEATTN_BUILD_TESTS=OFF -DSAGEATTN_BUILD_GPU_CHECKS=ON -DSAGEATTN_INSTALL=OFF)
  command -v ninja >/dev/null || options+=(-G "Unix Makefiles")
  # The program needs two header libraries; without them gpu_check is enough.
  if printf '#include <CLI/CLI.hpp>\n#include <nlohmann/json.hpp>\n' |
    "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
    options+=(-DSAGEATTN_BUILD_CLI=ON)
  else
    options+=(-DSAGEATTN_BUILD_CLI=OFF)
  fi
  cmake --preset release -B "$out/build" "${options[@]}" &&
    cmake --build "$out/build" --parallel "${JOBS:-$(nproc)}"
}

# stage NAME LIMIT COMMAND...: runs into a log of its own, for at most LIMIT seconds.
stage() {
  local name=$1 limit=$2 log="$out/$1.log" start=$SECONDS code result summary
  shift 2
  timeout -k 10 "$limit" "$@" >"$log" 2>&1 </dev/null
  code=$?
  summary=$(grep -E '^[0-9]+ passed, |SUMMARY:|^skipped: |^self-test passed' "$log" | sed 's/^=* *//' | tr '\n' ';')
  case $code in
    0) result=ok ;;
    77)
      echo "check.sh: no usable GPU: $summary"
      exit 77
      ;;
    124 | 137) result=FAILED summary="over $limit s" ;;
    *) result=FAILED ;;
  esac
  # Of other stages the same words are an error.
  if [[ $name = *check ]] && grep -q 'Device not supported' "$log"; then
    result=skipped summary="compute-sanitizer does not support this device or its driver"
  fi
  [ "$result" != FAILED ] || { grep -E '^FAILED|^=+ +(Error|Invalid|Race)' "$log"; tail -n 5 "$log"; } | head -n 25 | cut -c -400
  row "$name" "$result" $((SECONDS - start)) "$summary"
}

# sanitize TOOL KERNEL OPTION...: by that kind of kernel, or by all if it is empty.
sanitize() {
  local tool=$1 kernel=$2
  shift 2
  local candidate sanitizer=""
  for candidate in "$(command -v compute-sanitizer)" /usr/local/cuda*/bin/compute-sanitizer; do
    [ -n "$sanitizer" ] || [ ! -x "$candidate" ] || sanitizer=$candidate
  done
  if [ -z "$sanitizer" ]; then
    row "$tool" skipped 0 "no compute-sanitizer on this machine"
    return
  fi
  stage "$tool" 240 "$sanitizer" --tool "$tool" --error-exitcode 9 "$@" \
    "$bin/gpu_check" --quick --threads 2 ${kernel:+--kernel "$kernel"}
}

if [ -z "$bin" ]; then
  start=$SECONDS
  if build >"$out/build.log" 2>&1; then
    row build ok $((SECONDS - start)) ""
  else
    tail -n 30 "$out/build.log"
    row build FAILED $((SECONDS - start)) "see $out/build.log"
    exit 1
  fi
  mkdir -p "$out/bin"
  for program in tests/gpu/gpu_check examples/cli/sageattn; do
    [ ! -e "$out/build/$program" ] || ln -sf "../build/$program" "$out/bin/"
  done
  bin=$out/bin
fi

for name in "${stages[@]}"; do
  case $name in
    memcheck) sanitize memcheck "" ;;
    # It does not follow bulk copies and wgmma.
    racecheck) sanitize racecheck mma_sync --racecheck-report all ;;
    synccheck) sanitize synccheck wgmma ;;
    selftest)
      stage selftest 120 "$bin/gpu_check" --only selftest
      if [ -x "$bin/sageattn" ]; then
        stage info 60 "$bin/sageattn" info
        stage program 60 "$bin/sageattn" selftest --backend cuda
      fi
      ;;
    *) stage "$name" 400 "$bin/gpu_check" --only "$name" --verbose ;;
  esac
done

echo
echo "What was skipped within the stages:"
grep -hE '^skipped |: skipped: |skipped, for one:' "$out"/*.log | sed 's/^ *//' | sort | uniq -c | sort -rn | cut -c -200 | head -n 40
echo
printf '%s\n' "${rows[@]}"
exit $failed
