#!/usr/bin/env python3
"""Compiles the public header as every supported C and C++, alone and beside the CUDA headers."""

import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wpadded", "-Wundef", "-Werror", "-fsyntax-only"]
C_STANDARDS = ["c99", "c11", "c17"]
CXX_STANDARDS = ["c++11", "c++14", "c++17", "c++20"]
COMPILERS = [
    ("gcc", C_STANDARDS, "c"),
    ("clang", C_STANDARDS, "c"),
    ("g++", CXX_STANDARDS, "c++"),
    ("clang++", CXX_STANDARDS, "c++"),
]

# Includes the header twice, and touches a struct and a function so that they are complete.
ALONE = """
#include <sageattn.h>
#include <sageattn.h>
int32_t use(const sageattn_plan *plan, const sageattn_execute_args *args, sageattn_error *err);
int32_t use(const sageattn_plan *plan, const sageattn_execute_args *args, sageattn_error *err) {
  return sageattn_execute(plan, args, NULL, args->struct_size, NULL, err);
}
"""
BESIDE_DRIVER = """
#include <sageattn.h>
#include <cuda.h>
int32_t use(const sageattn_plan *plan, const sageattn_execute_args *args, CUstream stream);
int32_t use(const sageattn_plan *plan, const sageattn_execute_args *args, CUstream stream) {
  return sageattn_execute(plan, args, NULL, 0, stream, NULL);
}
"""
BESIDE_RUNTIME = (
    BESIDE_DRIVER.replace("cuda.h", "cuda_runtime_api.h").replace("CUstream ", "cudaStream_t "))


def cuda_include():
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if name in os.environ:
            return os.path.join(os.environ[name], "include")
    return "/usr/local/cuda/include"


def main():
    cases = [("alone", ALONE, [])]
    include = cuda_include()
    for name, header, text in (("beside cuda.h", "cuda.h", BESIDE_DRIVER),
                               ("beside the CUDA runtime", "cuda_runtime_api.h", BESIDE_RUNTIME)):
        if os.path.isfile(os.path.join(include, header)):
            cases.append((name, text, ["-isystem", include]))

    compiled, faults = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "use.c")
        for what, text, extra in cases:
            with open(source, "w", encoding="utf-8") as file:
                file.write(text)
            for compiler, standards, language in COMPILERS:
                if not shutil.which(compiler):
                    continue
                for standard in standards:
                    command = [compiler, "-x", language, f"-std={standard}", *FLAGS, *extra,
                               "-I", os.path.join(ROOT, "include"), source]
                    run = subprocess.run(command, capture_output=True, text=True, check=False)
                    compiled += 1
                    if run.returncode:
                        faults += 1
                        print(f"{what}, {compiler} -std={standard}:\n{run.stderr}",
                              file=sys.stderr)
    print(f"{compiled} compilations, {faults} failed")
    return 1 if faults or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
