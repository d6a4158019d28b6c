#!/usr/bin/env bash
# Installs what is missing, builds, and runs all tests.
#
#   tests/run.sh        gcc or whatever CXX says, every test
#   tests/run.sh --ci   also format, clang-tidy, AddressSanitizer with UndefinedBehaviorSanitizer,
#                       and ThreadSanitizer
#
# Debian 12 and Ubuntu 24.04; needs root or sudo only if something must be installed. Everything is
# built below build/. JOBS=n sets how many things run at once. Exits 0 if everything passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/tools.sh
source tests/tools.sh

ci=false
case "${1-}" in
  "") ;;
  --ci) ci=true ;;
  *) die "unknown argument '$1' (known: --ci)" ;;
esac

jobs=${JOBS:-$(nproc)}
logs=build/logs
passed=0
skipped=0
failed=0
failures=()

# stage NAME COMMAND...: runs quietly into a log of its own; shows its end only on failure.
stage() {
  local name=$1 log="$logs/$1.log" start=$SECONDS
  shift
  if "$@" >"$log" 2>&1 </dev/null; then
    passed=$((passed + 1))
    printf 'ok      %s (%d s)\n' "$name" $((SECONDS - start))
  else
    failed=$((failed + 1))
    failures+=("$name")
    printf 'FAILED  %s (%d s), the end of %s:\n' "$name" $((SECONDS - start)) "$log"
    tail -n 60 "$log"
    return 1
  fi
}

# tests PRESET [COMMAND PREFIX...]: runs the tests of a preset and adds up their results.
tests() {
  local preset=$1 log="$logs/test-$1.log" summary
  shift
  "$@" ctest --preset "$preset" -j "$jobs" </dev/null 2>&1 | tee "$log" || true
  summary=$(grep -E '^[0-9]+% tests passed, [0-9]+ tests? failed out of [0-9]+' "$log") || {
    failed=$((failed + 1))
    failures+=("test-$preset")
    return 1
  }
  local bad total unrun
  bad=$(sed -E 's/.*passed, ([0-9]+) .*/\1/' <<<"$summary")
  total=$(sed -E 's/.* out of ([0-9]+).*/\1/' <<<"$summary")
  unrun=$(grep -cE '[*]{3}Skipped' "$log" || true) # which CTest counts as passed
  passed=$((passed + total - bad - unrun))
  skipped=$((skipped + unrun))
  failed=$((failed + bad))
  [ "$bad" -eq 0 ] || failures+=("test-$preset")
}

# build_and_test PRESET WERROR [COMMAND PREFIX OF ctest...]
build_and_test() {
  local preset=$1 werror=$2
  shift 2
  stage "configure-$preset" cmake --preset "$preset" "-DSAGEATTN_WERROR=$werror" "${launcher[@]}" &&
    stage "build-$preset" cmake --build --preset "$preset" --parallel "$jobs" &&
    tests "$preset" "$@"
}

check_format() {
  git_files '*.c' '*.cpp' '*.h' '*.hpp' '*.cu' '*.cuh' | xargs -0 -r "$(llvm_tool clang-format)" --dry-run -Werror
}

check_tidy() {
  local tidy
  tidy=$(llvm_tool clang-tidy)
  git_files 'src/*.cpp' | xargs -0 -r -n 1 -P "$jobs" "$tidy" -p build/release --quiet
}

mkdir -p "$logs"
if $ci; then install_llvm_tools; fi
install_build_tools
if $ci; then
  install_nvdisasm
  install_numpy
  install_package_tools
  install_go
  install_rust
  install_python_tools
fi
launcher=()
if command -v ccache >/dev/null; then
  launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi

if $ci; then
  stage format check_format || true
  build_and_test release ON || true
  stage tidy check_tidy || true
  build_and_test asan-ubsan ON || true
  # ThreadSanitizer wants memory where older ones expect it.
  fixed_layout=()
  if setarch -R true 2>/dev/null; then fixed_layout=(setarch -R); fi
  build_and_test tsan ON "${fixed_layout[@]}" || true
else
  # A newer compiler's new warnings are no reason not to test.
  build_and_test release OFF || true
fi

echo
for failure in "${failures[@]}"; do echo "FAILED: $failure"; done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
