#!/usr/bin/env python3
"""The Go package of examples/go: formatting, vet, its tests, its examples, and a module outside that
requires it by `replace`.

$SAGEATTN_TEST_FAKES is the folder of the fake driver and NVRTC, without which the tests skip a device.
Exits with 77 where there is no Go 1.19 or newer. Nothing is downloaded.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = os.path.join(ROOT, "examples", "go")
SKIPPED = 77


class Failed(Exception):
    pass


class Go:
    def __init__(self, library, build):
        self.scratch = os.path.join(os.path.abspath(build), "go")
        folder = os.path.dirname(os.path.abspath(library))
        self.environment = {
            **os.environ,
            "CGO_ENABLED": "1",
            "CGO_CFLAGS": f'-O2 -Wall -Werror "-I{os.path.join(ROOT, "include")}"',
            "CGO_LDFLAGS": f'"-L{folder}"',
            "LD_LIBRARY_PATH": folder,
            "GOCACHE": os.path.join(self.scratch, "cache"),
            "GOPATH": os.path.join(self.scratch, "path"),
            "GOENV": "off",
            "GOFLAGS": "-mod=mod",
            "GOPROXY": "off",
            "GOTOOLCHAIN": "local",
        }
        match = re.search(r"go1\.(\d+)", self.run(["go", "version"]))
        self.minor = int(match.group(1)) if match else 0
        # Every pointer that is stored is checked, not only those that are passed.
        if self.minor < 21:
            self.environment["GODEBUG"] = "cgocheck=2"
        else:
            self.environment["GOEXPERIMENT"] = "cgocheck2"

    def run(self, command, folder=PACKAGE, allowed=(0,), **variables):
        result = subprocess.run(command, cwd=folder, env={**self.environment, **variables}, text=True,
                                check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)
        if result.returncode not in allowed:
            raise Failed(f"{shlex.join(command)}\n{result.stdout}")
        return result.stdout

    def check_format(self):
        listed = self.run(["gofmt", "-l", "."])
        if listed:
            raise Failed(f"gofmt would change:\n{listed}")

    def check_tests(self):
        self.run(["go", "vet", "./..."])
        fakes = os.environ.get("SAGEATTN_TEST_FAKES")
        variables = {}
        if fakes:
            variables = {"LD_LIBRARY_PATH": self.environment["LD_LIBRARY_PATH"] + os.pathsep + fakes,
                         "SAGEATTN_NVRTC": os.path.join(fakes, "libfake_nvrtc.so")}
        self.run(["go", "test", "-race", "-count=1", "."], **variables)

    def build(self):
        programs = os.path.join(self.scratch, "bin")
        os.makedirs(programs, exist_ok=True)
        self.run(["go", "build", "-o", programs + os.sep, "./..."])
        return programs

    def check_examples(self, programs, c_example):
        for name in ("lse_merge", "varlen", "goroutines"):
            print(self.run([os.path.join(programs, name)]), end="")
        print(self.run([os.path.join(programs, "cuda")], allowed=(0, SKIPPED)), end="")
        self.compare(self.run([os.path.join(programs, "quickstart")]), self.run([c_example]))

    @staticmethod
    def compare(output, expected):
        if output != expected or not expected:
            raise Failed(f"quickstart prints\n{output}but the C example\n{expected}")

    def check_replace(self, expected):
        """What docs/go.md tells a user to do."""
        user = os.path.join(self.scratch, "user")
        shutil.rmtree(user, ignore_errors=True)
        os.makedirs(user)
        shutil.copy(os.path.join(PACKAGE, "quickstart", "main.go"), user)
        self.run(["go", "mod", "init", "user"], user)
        self.run(["go", "mod", "edit", "-require=sageattn@v0.0.0", f"-replace=sageattn={PACKAGE}"],
                 user)
        self.compare(self.run(["go", "run", "."], user), expected)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", help="libsageattn.so")
    parser.add_argument("build", help="build tree, for Go's cache and the programs")
    parser.add_argument("c_example", help="the program of examples/c/attention.c")
    args = parser.parse_args()
    if not shutil.which("go") or not shutil.which("gofmt"):
        print("skipped: there is no go (Debian: golang-go)")
        return SKIPPED
    try:
        go = Go(args.library, args.build)
        c_example = os.path.abspath(args.c_example)
        if go.minor < 19:
            print(f"skipped: Go 1.{go.minor} is older than 1.19")
            return SKIPPED
        go.check_format()
        go.check_tests()
        programs = go.build()
        go.check_examples(programs, c_example)
        go.check_replace(go.run([c_example]))
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
