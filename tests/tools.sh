# Sourced by scripts at the repository root: finds, and where it can installs, what they need.

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# install_packages PACKAGE...: with apt, as root or through sudo, asking nothing.
install_packages() {
  [ $# -gt 0 ] || return 0
  command -v apt-get >/dev/null ||
    die "missing: $*. Those are Debian's names; install them with your system's package manager"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "missing: $*. Install them, or run as root or with sudo"
    as_root=(sudo)
  fi
  echo "installing $*"
  local log
  log=$(mktemp)
  if ! { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
      --no-install-recommends "$@"; } </dev/null >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    die "apt-get could not install $*"
  fi
  rm -f "$log"
}

has_header() {
  printf '#include <%s>\n' "$1" | "${CXX:-g++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null
}

install_build_tools() {
  local missing=()
  if [ -z "${CXX-}" ]; then
    command -v g++ >/dev/null || missing+=(g++)
  elif ! command -v "${CXX%% *}" >/dev/null; then
    die "CXX is '$CXX', but there is no such program: install it, or unset CXX to use g++"
  fi
  command -v cmake >/dev/null || missing+=(cmake)
  command -v ninja >/dev/null || missing+=(ninja-build)
  command -v python3 >/dev/null || missing+=(python3)
  command -v pkg-config >/dev/null || missing+=(pkg-config)
  has_header catch2/catch_test_macros.hpp || has_header catch2/catch.hpp || missing+=(catch2)
  has_header CLI/CLI.hpp || missing+=(libcli11-dev)
  has_header nlohmann/json.hpp || missing+=(nlohmann-json3-dev)
  install_packages "${missing[@]}"
}

# Prints the LLVM tool of version 14, whose formatting is the reference, else the default one.
llvm_tool() {
  command -v "$1-14" || command -v "$1"
}

install_llvm_tools() {
  local missing=() tool
  command -v clang++ >/dev/null || missing+=(clang)
  for tool in clang-format clang-tidy; do
    if ! llvm_tool "$tool" >/dev/null; then
      if apt-cache show "$tool-14" >/dev/null 2>&1; then missing+=("$tool-14"); else missing+=("$tool"); fi
    fi
  done
  install_packages "${missing[@]}"
  # The sanitizers' run-time libraries are a package of their own, named after clang's version.
  if [ ! -e "$(clang -print-file-name=libclang_rt.asan-"$(uname -m)".a)" ]; then
    install_packages "libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev"
  fi
}

# Sets NVDISASM, from PyPI if there is none.
install_nvdisasm() {
  local package=nvidia-cuda-nvdisasm==13.5.37 log
  NVDISASM=${NVDISASM:-$(command -v nvdisasm || echo "$PWD/build/tools/nvidia/cu13/bin/nvdisasm")}
  export NVDISASM
  [ ! -x "$NVDISASM" ] || return 0
  python3 -m pip --version >/dev/null 2>&1 || install_packages python3-pip
  echo "installing $package"
  log=$(mktemp)
  if ! python3 -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
    --target build/tools "$package" </dev/null >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    die "pip could not install $package"
  fi
  rm -f "$log"
}

# NumPy for test_language.py, which downloads its models with pip.
install_numpy() {
  python3 -c 'import numpy' 2>/dev/null || install_packages python3-numpy
  python3 -m pip --version >/dev/null 2>&1 || install_packages python3-pip
}

# For check_debian.py; and ccache, so that check_consumers.py need not compile the library again.
install_package_tools() {
  local missing=()
  command -v dpkg-shlibdeps >/dev/null || missing+=(dpkg-dev)
  command -v ccache >/dev/null || missing+=(ccache)
  install_packages "${missing[@]}"
}

install_go() {
  command -v go >/dev/null || install_packages golang-go
}

install_rust() {
  [ -x /usr/bin/cargo-clippy ] || install_packages cargo rustc rustfmt rust-clippy
}

# What test_python.py makes a wheel with and checks types with.
install_python_tools() {
  python3 -c 'import setuptools, wheel' 2>/dev/null || install_packages python3-setuptools python3-wheel
  python3 -c 'import mypy' 2>/dev/null || install_packages mypy
}

# git_files PATTERN...: tracked and new files that match, ended by NUL.
git_files() {
  git -c safe.directory='*' ls-files -z -co --exclude-standard -- "$@"
}
