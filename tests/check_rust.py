#!/usr/bin/env python3
"""The Rust crates of examples/rust, with each of the features `link` and `dlopen`: tests and examples,
and where the library is looked for. With --lint also formatting and clippy, and warnings are errors.

The system's cargo is preferred: Debian 12's is the oldest that must do. Nothing is downloaded. Exits
with 77 where there is no cargo.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORKSPACE = os.path.join(ROOT, "examples", "rust")
EXAMPLES = ("quickstart", "lse_merge", "varlen", "threads")
SKIPPED = 77


class Failed(Exception):
    pass


class Rust:
    def __init__(self, args, cargo):
        self.args = args
        self.cargo = cargo
        self.library = os.path.abspath(args.library)
        self.c_example = os.path.abspath(args.c_example)
        self.folder = os.path.dirname(self.library)
        self.target = os.path.join(os.path.abspath(args.build), "rust")
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([os.path.dirname(cargo), os.environ["PATH"]]),  # its rustc, too
            "CARGO_TARGET_DIR": self.target,
            "CARGO_NET_OFFLINE": "true",
            "SAGEATTN_LIB_DIR": self.folder,
            "LD_LIBRARY_PATH": self.folder,
        }
        # What nobody looks at takes half of the time: debug information, the standard library's included.
        self.environment["CARGO_INCREMENTAL"] = "0"
        for profile in ("DEV", "TEST"):
            self.environment[f"CARGO_PROFILE_{profile}_DEBUG"] = "0"
            self.environment[f"CARGO_PROFILE_{profile}_STRIP"] = "debuginfo"
        for name in ("SAGEATTN_LIBRARY", "LIBRARY_PATH"):
            self.environment.pop(name, None)
        if args.lint:
            self.environment["RUSTFLAGS"] = "-D warnings"

    def run(self, command, status=0, **environment):
        """What the command prints. It must exit with `status`. A variable that is None is not set."""
        merged = {**self.environment, **environment}
        merged = {name: value for name, value in merged.items() if value is not None}
        result = subprocess.run(command, cwd=WORKSPACE, env=merged, text=True, check=False,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)
        if result.returncode != status:
            raise Failed(f"{shlex.join(command)}: exit status {result.returncode} instead of {status}"
                         f"\n{result.stdout}")
        return result.stdout

    def example(self, name, status=0, **environment):
        return self.run([os.path.join(self.target, "debug", "examples", name)], status, **environment)

    def feature(self, name):
        features = ["--no-default-features", "--features", f"sageattn/{name},sageattn-sys/{name}"]
        self.run([self.cargo, "test", "--quiet", *features])  # builds the examples, too
        for example in EXAMPLES:
            self.example(example)
        expected = self.run([self.c_example])
        found = self.example("quickstart")
        if found != expected:
            raise Failed(f"quickstart prints\n{found}but {self.c_example}\n{expected}")
        if "skipped: SAGEATTN_E_" not in self.example("cuda", SKIPPED, CUDA_VISIBLE_DEVICES=""):
            raise Failed("without a GPU, cuda does not say why it is skipped")
        if self.args.lint and name == "link":
            self.run([self.cargo, "fmt", "--all", "--check"])
        if self.args.lint:
            self.run([self.cargo, "clippy", "--quiet", "--all-targets", *features])

    def link(self):
        """The library is found by pkg-config, and a wrong folder is named."""
        self.feature("link")
        build = [self.cargo, "build", "--quiet", "-p", "sageattn-sys", "--example", "layout"]
        if "nowhere/libsageattn.so" not in self.run(build, 101, SAGEATTN_LIB_DIR="nowhere"):
            raise Failed("the error does not name SAGEATTN_LIB_DIR's folder")
        if shutil.which("pkg-config"):
            with open(os.path.join(self.target, "sageattn.pc"), "w", encoding="utf-8") as file:
                file.write(f"libdir={self.folder}\nName: sageattn\nDescription: .\nVersion: 0\n")
            self.run(build, SAGEATTN_LIB_DIR=None, PKG_CONFIG_PATH=self.target)

    def dlopen(self):
        """Programs start without the library, take the one that is named, and say what is missing."""
        self.feature("dlopen")
        self.example("quickstart", LD_LIBRARY_PATH=None, SAGEATTN_LIBRARY=self.library)
        output = self.example("quickstart", 1, SAGEATTN_LIBRARY="nowhere/libsageattn.so")
        if "Error: library not loaded: cannot load nowhere/libsageattn.so" not in output:
            raise Failed(f"the error does not name what could not be loaded: {output}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("build", help="folder to build in")
    parser.add_argument("c_example", help="the program of examples/c/attention.c")
    parser.add_argument("--lint", action="store_true")
    args = parser.parse_args()
    cargo = shutil.which("cargo", path=os.pathsep.join(["/usr/bin", os.environ["PATH"]]))
    if not cargo:
        print("skipped: there is no cargo")
        return SKIPPED
    rust = Rust(args, cargo)
    print(rust.run([cargo, "--version"]), end="")
    try:
        for check in (rust.link, rust.dlopen):
            check()
            print(f"{check.__name__}: ok")
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
