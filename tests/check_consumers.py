#!/usr/bin/env python3
"""Builds and runs programs in C and C++ against the library in the ways that users have:
find_package, pkg-config, the plain compiler, and add_subdirectory (shared and static); and all of
examples/c and examples/cpp on their own.

The build tree is installed into a folder with a space in its name, which is then moved.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONSUMER = os.path.join(ROOT, "tests", "consumer")
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
C_FLAGS = ["-std=c99", *WARNINGS]


class Failed(Exception):
    pass


def run(command, cwd=None, **environment):
    result = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, text=True,
                            check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
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

    def configure(self, name, source, *options):
        build = os.path.join(self.scratch, name)
        run([self.args.cmake, "-S", source, "-B", build, "-G", self.args.generator,
             f"-DCMAKE_C_COMPILER={self.args.cc}", f"-DCMAKE_CXX_COMPILER={self.args.cxx}",
             *options])
        return build

    def cmake_project(self, name, *options):
        build = self.configure(name, CONSUMER, *options)
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

    def environment(self):
        folder = os.path.join(self.scratch, "environment")
        os.mkdir(folder)
        shutil.copy(os.path.join(CONSUMER, "main.c"), folder)
        run([self.args.cc, "main.c", "-lsageattn"], cwd=folder, CPATH=f"{self.prefix}/include",
            LIBRARY_PATH=self.libdir)
        run([os.path.join(folder, "a.out")], LD_LIBRARY_PATH=self.libdir)

    def pkg_config(self):
        if not shutil.which("pkg-config"):
            return
        path = find(self.prefix, "sageattn.pc")
        flags = run(["pkg-config", "--cflags", "--libs", "sageattn"], PKG_CONFIG_PATH=path)
        self.compile("pkg_config", *shlex.split(flags))

    def examples(self):
        """Every program is a test of its project, and exits with 77 where it cannot run."""
        for language, variable in (("c", "CMAKE_C_FLAGS"), ("cpp", "CMAKE_CXX_FLAGS")):
            source = os.path.join(ROOT, "examples", language)
            build = self.configure(f"examples_{language}", source,
                                   f"-DCMAKE_PREFIX_PATH={self.prefix}",
                                   f"-D{variable}={' '.join(WARNINGS)}")
            run([self.args.cmake, "--build", build, "--parallel", "2"])
            output = run([self.args.ctest, "--test-dir", build, "--output-on-failure",
                          "--no-tests=error"])
            for name in os.listdir(source):
                stem, extension = os.path.splitext(name)
                if extension in (".c", ".cpp") and not re.search(rf"_{stem}[_ ]", output):
                    raise Failed(f"examples/{language}/{name} is no test:\n{output}")

    def wrapper(self):
        """sageattn.hpp, with each compiler that is there."""
        folder = os.path.join(ROOT, "examples", "cpp")
        compilers = {self.args.cxx, *filter(shutil.which, ("g++", "clang++"))}
        for number, compiler in enumerate(sorted(compilers)):
            program = os.path.join(self.scratch, f"wrapper{number}")
            run([compiler, "-std=c++17", *WARNINGS, f"-I{folder}", f"-I{self.prefix}/include",
                 os.path.join(CONSUMER, "wrapper.cpp"), "-o", program, f"-L{self.libdir}",
                 "-lsageattn"])
            run([program], LD_LIBRARY_PATH=self.libdir)

    def add_subdirectory(self):
        """Compiled as the build tree was, so that ccache, if there, has most of the objects."""
        with open(os.path.join(self.args.build, "CMakeCache.txt"), encoding="utf-8") as cache:
            options = [f"-D{line.strip()}" for line in cache
                       if re.match(r"CMAKE_(C|CXX)_(FLAGS(_RELEASE)?|COMPILER_LAUNCHER):|"
                                   r"CMAKE_BUILD_TYPE:|SAGEATTN_WERROR:", line)]
        options.append(f"-DSAGEATTN_SOURCE_DIR={ROOT}")
        self.cmake_project("subdirectory", *options)
        self.cmake_project("subdirectory", "-DBUILD_SHARED_LIBS=OFF")  # reuses the objects


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", help="build tree to install from")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--ctest", default="ctest")
    parser.add_argument("--generator", default="Ninja")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--cxx", default="c++")
    args = parser.parse_args()

    faults = 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            consumers = Consumers(args, scratch)
            ways = (consumers.find_package, consumers.plain_compiler, consumers.environment,
                    consumers.pkg_config, consumers.examples, consumers.wrapper,
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
