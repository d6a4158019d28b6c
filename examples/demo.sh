#!/usr/bin/env bash
# Installs what is missing, builds the program and runs its demonstration on examples/data.
# Debian 12 and Ubuntu 24.04; needs root or sudo only if something must be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/tools.sh
source tests/tools.sh

install_build_tools
log=build/demo.log
mkdir -p build
echo "building (log: $log)"
{ cmake --preset release -DSAGEATTN_WERROR=OFF &&
  cmake --build --preset release --target sageattn-cli --parallel "${JOBS:-$(nproc)}"; } \
  >"$log" 2>&1 </dev/null || {
  tail -n 40 "$log" >&2
  die "the build failed"
}
exec build/release/examples/cli/sageattn demo --data examples/data "$@"
