#!/usr/bin/env python3
"""The shared library exports what the header declares and needs nothing but libc and libm."""

import argparse
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NODE = "SAGEATTN_0"
ALLOWED_LIBRARIES = re.compile(r"^(libc\.so|libm\.so|ld-linux[\w-]*\.so)\.\d+$")


def declared_functions():
    with open(os.path.join(ROOT, "include", "sageattn.h"), encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
    return set(re.findall(r"^SAGEATTN_API[^;(]*?\b(sageattn_\w+)\s*\(", text, re.MULTILINE))


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--readelf", default="readelf")
    args = parser.parse_args()
    faults = []

    expected = {f"T {name}@@{NODE}" for name in declared_functions()} | {f"A {NODE}"}
    actual = set()
    for line in output_of(args.nm, "-D", "--defined-only", args.library).splitlines():
        kind, name = line.split()[-2:]
        actual.add(f"A {NODE}" if name == f"{NODE}@@{NODE}" else f"{kind} {name}")
    faults += [f"declared but not exported: {name}" for name in sorted(expected - actual)]
    faults += [f"exported but not declared: {name}" for name in sorted(actual - expected)]

    dynamic = output_of(args.readelf, "-dW", args.library)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    faults += [f"needs {name}" for name in needed if not ALLOWED_LIBRARIES.match(name)]
    soname = re.findall(r"\(SONAME\).*\[(.*)\]", dynamic)
    if soname != ["libsageattn.so.0"]:
        faults.append(f"soname is {soname}")
    faults += [f"has a dynamic entry {tag}" for tag in ("RPATH", "RUNPATH", "TEXTREL")
               if f"({tag})" in dynamic]
    if not re.search(r"\(FLAGS(_1)?\).*\b(BIND_)?NOW\b", dynamic):
        faults.append("is not bound at load time")
    if "GNU_RELRO" not in output_of(args.readelf, "-lW", args.library):
        faults.append("has no read-only relocations")

    for fault in faults:
        print(f"{os.path.basename(args.library)}: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
