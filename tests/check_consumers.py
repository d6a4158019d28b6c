#!/usr/bin/env python3
"""Builds and runs a C program against the library in the ways that users have: find_package,
pkg-config, the plain compiler, and add_subdirectory (shared and static).

The build tree is installed into a folder with a space in its name, which is then moved.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONSUMER = os.path.join(ROOT, "tests", "consumer")
C_FLAGS = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]


class Failed(Exception):
    pass


def run(command, **environment):
    result = subprocess.run(command, env={**os.environ, **environment}, text=True, check=False,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)
    if result.returncode:
        raise Failed(f"{shlex.join(command)}\n{result.stdout}")
    return result.stdout


def find(folder, name):
    for path, _, files in os.walk(folder):
        if name in files:
            return path
    raise Failed(f"no {name} was installed")


class Consumers:
    def __init__(self, args, scratch):
        self.args = args
        self.scratch = scratch
        first = os.path.join(scratch, "first prefix")
        run([args.cmake, "--install", args.build, "--prefix", first])
        self.prefix = os.path.join(scratch, "moved prefix")
        os.rename(first, self.prefix)
        self.libdir = find(self.prefix, "libsageattn.so")

    def cmake_project(self, name, *options):
        build = os.path.join(self.scratch, name)
        run([self.args.cmake, "-S", CONSUMER, "-B", build, "-G", self.args.generator,
             f"-DCMAKE_C_COMPILER={self.args.cc}", f"-DCMAKE_CXX_COMPILER={self.args.cxx}",
             *options])
        run([self.args.cmake, "--build", build, "--target", "consumer", "--parallel", "2"])
        run([os.path.join(build, "consumer")])

    def compile(self, name, *flags):
        program = os.path.join(self.scratch, name)
        source = os.path.join(CONSUMER, "main.c")
        run([self.args.cc, *C_FLAGS, source, "-o", program, *flags])
        run([program], LD_LIBRARY_PATH=self.libdir)

    def find_package(self):
        self.cmake_project("find_package", f"-DCMAKE_PREFIX_PATH={self.prefix}")

    def plain_compiler(self):
        self.compile("plain", f"-I{self.prefix}/include", f"-L{self.libdir}", "-lsageattn")

    def pkg_config(self):
        if not shutil.which("pkg-config"):
            return
        path = find(self.prefix, "sageattn.pc")
        flags = run(["pkg-config", "--cflags", "--libs", "sageattn"], PKG_CONFIG_PATH=path)
        self.compile("pkg_config", *shlex.split(flags))

    def add_subdirectory(self):
        self.cmake_project("subdirectory", f"-DSAGEATTN_SOURCE_DIR={ROOT}")
        self.cmake_project("subdirectory", "-DBUILD_SHARED_LIBS=OFF")  # reuses the objects


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", help="build tree to install from")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--generator", default="Ninja")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--cxx", default="c++")
    args = parser.parse_args()

    faults = 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            consumers = Consumers(args, scratch)
            ways = (consumers.find_package, consumers.plain_compiler, consumers.pkg_config,
                    consumers.add_subdirectory)
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 1
        for way in ways:
            try:
                way()
                print(f"{way.__name__}: ok")
            except Failed as failure:
                faults += 1
                print(f"{way.__name__}: {failure}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
