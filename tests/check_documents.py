#!/usr/bin/env python3
"""Runs the code blocks of README.md and docs/, and checks links.

    check_documents.py BUILD [DOCUMENT...]

BUILD is installed into a scratch folder, against which everything is compiled. The blocks of the DOCUMENTs
(default: all) are run by their language:

  python            the blocks of a document one after the other in one process; needs NumPy
  c, cpp, rust, go  a complete program each
  cmake             a CMakeLists.txt beside the files of examples/c and examples/cpp
  sh                a fresh shell each, in a copy of the repository that is the document's own and has an empty
                    build/, with the library and the program installed ($PREFIX)

A comment before a block changes that:

  <!-- part of: examples/c/attention.c -->  a fragment: its lines are in that file, adjacent, in this order,
                                            but for indentation
  <!-- not run: reason -->

Every block names its language; `text` is one that is not run. Links lead to files of the repository and to
headings that exist, and docs/api.md names every function of the header.

Exits with 1 if anything is wrong, else with 77 if a block could not be run here, with the reason.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import glob
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse

from check_sources import repository_files

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
C_FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
CXX_FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
NOT_RUN = {"text", "json", "toml"}
SECONDS = 60  # for one program
DIRECTIVE = re.compile(r"<!--\s*(part of|not run)\s*:\s*(\S.*?)\s*-->$")
LIKE_DIRECTIVE = re.compile(r"<!--\s*(part|not)\b", re.IGNORECASE)
FENCE = re.compile(r"(\s*)(```+|~~~+)\s*([^`\s]*)[^`]*$")
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^()\s>]+)>?[^()]*\)")
PYTHON_DRIVER = """
import json, sys
namespace = {"__name__": "__main__"}
log, blocks = json.load(sys.stdin)
with open(log, "wb", buffering=0) as passed:
    for path, line, text in blocks:
        exec(compile("\\n" * line + text, path, "exec"), namespace)
        passed.write(b".")
"""


class Failed(Exception):
    pass


class Skipped(Exception):
    pass


@dataclasses.dataclass
class Block:
    path: str
    line: int  # of the fence
    language: str
    text: str
    directive: str = ""
    argument: str = ""

    def where(self):
        return f"{self.path}:{self.line}"

    def name(self):
        return re.sub(r"\W", "_", self.where())


class Document:
    """Blocks, links and headings of a file, and what is wrong with how they are written."""

    def __init__(self, path):
        self.path, self.blocks, self.links, self.anchors, self.faults = path, [], [], set(), []
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            lines = file.read().splitlines()
        pending = None  # a directive that waits for its block
        number = 0
        while number < len(lines):
            line = lines[number]
            number += 1
            fence = FENCE.match(line)
            if fence:
                number = self._block(lines, number, fence, pending)
                pending = None
                continue
            if not line.strip():
                continue
            if pending:
                self._fault(pending[2], "no code block follows")
            directive = DIRECTIVE.match(line.strip())
            pending = (*directive.groups(), number) if directive else None
            if not directive and LIKE_DIRECTIVE.match(line):
                self._fault(number, "is neither '<!-- part of: FILE -->' nor '<!-- not run: REASON -->'")
            self._text(number, line)
        if pending:
            self._fault(pending[2], "no code block follows")

    def _fault(self, line, what):
        self.faults.append(f"{self.path}:{line}: {what}")

    def _block(self, lines, number, fence, pending):
        indent, mark, language = fence.groups()
        start = number
        while number < len(lines) and not re.fullmatch(rf"\s*{mark}+\s*", lines[number]):
            number += 1
        if number == len(lines):
            self._fault(start, "the code block never ends")
        text = "".join(line.removeprefix(indent) + "\n" for line in lines[start:number])
        if not language:
            self._fault(start, "a code block without a language: write text if it is no code")
        elif language not in RUNNERS and language not in NOT_RUN:
            self._fault(start, f"unknown language '{language}' (known: {', '.join([*RUNNERS, *sorted(NOT_RUN)])})")
        else:
            self.blocks.append(Block(self.path, start, language, text, *(pending or ())[:2]))
        return number + 1

    def _text(self, number, line):
        heading = re.match(r"#+\s+(.*?)\s*#*$", line)
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1))
            slug = anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = 0
            while anchor in self.anchors:
                count += 1
                anchor = f"{slug}-{count}"
            self.anchors.add(anchor)
        self.anchors.update(re.findall(r'<a (?:id|name)="([^"]+)"', line))
        prose = re.sub(r"`[^`]*`", "", line)
        self.links += [(number, target) for target in LINK.findall(prose)]


def check_links(path, documents, files):
    """documents: those that have been read, by path; more are added. files: of the repository, and their folders."""
    def read(path):
        return documents.get(path) or documents.setdefault(path, Document(path))

    for line, link in read(path).links:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = urllib.parse.unquote(link).partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else path
        if target not in files:
            yield f"{path}:{line}: link to {link}: no such file in the repository"
        elif anchor and anchor not in read(target).anchors:
            yield f"{path}:{line}: link to {link}: {target} has no such heading"


def check_functions():
    with open(os.path.join(ROOT, "include/sageattn.h"), encoding="utf-8") as file:
        functions = re.findall(r"^SAGEATTN_API[^;]*?\b(sageattn_\w+)\(", file.read(), re.MULTILINE)
    with open(os.path.join(ROOT, "docs/api.md"), encoding="utf-8") as file:
        api = file.read()
    for function in functions:
        if not re.search(rf"\b{function}\b", api):
            yield f"docs/api.md: does not mention {function}"


def check_part(block):
    path = os.path.join(ROOT, block.argument)
    if not os.path.isfile(path):
        raise Failed(f"part of {block.argument}: no such file")
    with open(path, encoding="utf-8") as file:
        whole = [line.strip() for line in file]
    part = [line.strip() for line in block.text.strip().splitlines()]
    longest = 0
    for start in range(len(whole)):
        same = 0
        while same < len(part) and start + same < len(whole) and whole[start + same] == part[same]:
            same += 1
        longest = max(longest, same)
    if longest < len(part):
        raise Failed(f"{block.argument} has no such lines: the {longest + 1}. line of the block differs:\n"
                     f"{part[longest]}")


def run(command, cwd, environment, stdin=""):
    # In a session of its own: what it has started ends with it, also when time is up.
    with subprocess.Popen(command, cwd=cwd, env=environment, text=True, start_new_session=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            output = process.communicate(stdin, timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            raise Failed(f"{shlex.join(command)}\nstill running after {SECONDS} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise Failed(f"{shlex.join(command)}\n{output}exit code {process.returncode}")


def need(condition, reason):
    if not condition:
        raise Skipped(reason)


class Runner:
    def __init__(self, args, scratch, files):
        self.args, self.scratch, self.files = args, scratch, files
        self.prefix = self.folder("prefix")
        run([args.cmake, "--install", args.build, "--prefix", self.prefix], scratch, dict(os.environ))
        library = glob.glob(os.path.join(self.prefix, "**", "libsageattn.so"), recursive=True)[0]
        libdir = os.path.dirname(library)
        self.environment = {
            **os.environ, "PREFIX": self.prefix, "LD_LIBRARY_PATH": libdir, "LIBRARY_PATH": libdir,
            "CPATH": os.path.join(self.prefix, "include"), "CMAKE_PREFIX_PATH": self.prefix,
            "PKG_CONFIG_PATH": os.path.join(libdir, "pkgconfig"), "SAGEATTN_LIBRARY": library,
            "PATH": os.path.join(self.prefix, "bin") + os.pathsep + os.environ["PATH"],
            "SAGEATTN_CACHE_DIR": self.folder("cache"), "CC": args.cc, "CXX": args.cxx,
            "PYTHONDONTWRITEBYTECODE": "1", "GOPROXY": "off", "GOFLAGS": "-mod=mod",
            "GOTOOLCHAIN": "local", "CARGO_NET_OFFLINE": "true"}

    def folder(self, name):
        path = os.path.join(self.scratch, name)
        os.makedirs(path, exist_ok=True)
        return path

    def write(self, folder, name, text):
        path = os.path.join(self.folder(folder), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def repository(self, document):
        """A copy of the repository, of the document's own."""
        copy = os.path.join(self.scratch, "copy of " + document.replace("/", " "))
        if not os.path.exists(copy):
            os.makedirs(os.path.join(copy, "build"))
            for name in self.files:
                os.makedirs(os.path.dirname(os.path.join(copy, name)), exist_ok=True)
                shutil.copy2(os.path.join(ROOT, name), os.path.join(copy, name))
        return copy

    def compiled(self, block, suffix, compiler, flags):
        if not re.search(r"\bmain\s*\(", block.text):
            raise Failed("no main(): a fragment says which file it is part of")
        folder = self.folder(block.name())
        source = self.write(folder, "main" + suffix, block.text)
        run([compiler, *flags, source, "-o", "main", "-lsageattn", "-lm", "-pthread"], folder, self.environment)
        run(["./main"], folder, self.environment)

    def c(self, block):
        self.compiled(block, ".c", self.args.cc, C_FLAGS)

    def cpp(self, block):
        self.compiled(block, ".cpp", self.args.cxx, [*CXX_FLAGS, "-I" + os.path.join(ROOT, "examples", "cpp")])

    def cmake(self, block):
        folder = self.folder(block.name())
        for source in glob.glob(os.path.join(ROOT, "examples", "c", "*.c")) + \
                glob.glob(os.path.join(ROOT, "examples", "cpp", "*pp")):
            shutil.copy(source, folder)
        self.write(folder, "CMakeLists.txt", block.text)
        run([self.args.cmake, "-S", ".", "-B", "build", "-G", self.args.generator], folder, self.environment)
        run([self.args.cmake, "--build", "build"], folder, self.environment)

    def sh(self, block):
        for tool in ("cargo", "go"):
            need(shutil.which(tool) or not re.search(rf"\b{tool} \w", block.text), f"there is no {tool}")
        run(["bash", "-euo", "pipefail", "-c", block.text], self.repository(block.path), self.environment)

    def rust(self, block):
        need(shutil.which("cargo"), "there is no cargo")
        crates = {}
        for path in glob.glob(os.path.join(ROOT, "examples", "rust", "*", "Cargo.toml")):
            with open(path, encoding="utf-8") as file:
                name = re.search(r'^\[package\].*?^name\s*=\s*"([^"]+)"', file.read(), re.DOTALL | re.MULTILINE)
            if name:
                crates[name.group(1)] = os.path.dirname(path)
        need(crates, "there is no crate in examples/rust")
        manifest = '[package]\nname = "documents"\nversion = "0.0.0"\nedition = "2021"\n[workspace]\n[dependencies]\n'
        manifest += "".join(f"{name} = {{ path = {json.dumps(path)} }}\n" for name, path in crates.items())
        folder = self.folder("rust " + block.name())
        self.write(folder, "Cargo.toml", manifest)
        self.write(folder, "src/main.rs", block.text)
        environment = {**self.environment, "CARGO_TARGET_DIR": os.path.join(self.scratch, "cargo")}  # all blocks share it
        run(["cargo", "run", "--quiet"], folder, environment)

    def go(self, block):
        need(shutil.which("go"), "there is no go")
        binding = os.path.join(ROOT, "examples", "go")
        need(os.path.isfile(os.path.join(binding, "go.mod")), "there is no module in examples/go")
        with open(os.path.join(binding, "go.mod"), encoding="utf-8") as file:
            text = file.read()
        module = re.search(r"^module\s+(\S+)", text, re.MULTILINE).group(1)
        version = re.search(r"^go\s+\S+", text, re.MULTILINE).group(0)
        folder = self.folder("go " + block.name())
        self.write(folder, "go.mod", f"module documents\n\n{version}\n\nrequire {module} v0.0.0\n\n"
                                     f'replace {module} => "{binding}"\n')
        self.write(folder, "main.go", block.text)
        run(["go", "run", "."], folder, self.environment)

    def python(self, blocks):
        """The outcome of each block of a document: the one that fails is the last to run."""
        if not importlib.util.find_spec("numpy"):
            return [Skipped("NumPy is not installed")] * len(blocks)
        copy = self.repository(blocks[0].path)
        log = os.path.join(self.scratch, blocks[0].name())
        script = json.dumps([log, [(block.path, block.line, block.text) for block in blocks]])
        driver = self.write("driver", "run_blocks.py", PYTHON_DRIVER)
        environment = {**self.environment, "PYTHONPATH": os.path.join(copy, "examples", "python")}
        failures = []
        try:
            run([sys.executable, driver], copy, environment, script)
        except Failed as failure:
            failures = [failure]
        passed = os.path.getsize(log)  # a byte each
        return ([None] * passed + failures + [Failed("not reached")] * len(blocks))[:len(blocks)]

    def outcomes(self, language, blocks):
        """(block, seconds, exception or None) of each."""
        start = time.monotonic()
        if language == "python":
            outcomes = self.python(blocks)
            seconds = (time.monotonic() - start) / len(blocks)
            return [(block, seconds, outcome) for block, outcome in zip(blocks, outcomes, strict=True)]
        results = []
        for block in blocks:
            outcome = None
            try:
                RUNNERS[language](self, block)
            except (Failed, Skipped) as error:
                outcome = error
            results.append((block, time.monotonic() - start, outcome))
            start = time.monotonic()
        return results


RUNNERS = {"c": Runner.c, "cpp": Runner.cpp, "rust": Runner.rust, "go": Runner.go, "python": Runner.python,
           "sh": Runner.sh, "cmake": Runner.cmake}


def all_results(args, documents, files):
    """(block, seconds, exception, or what to print) of each block of the documents, in order."""
    results, jobs = [], {}
    for document in documents:
        for block in document.blocks:
            if block.directive == "part of":
                try:
                    check_part(block)
                    results.append((block, 0, f"part of {block.argument}"))
                except Failed as failure:
                    results.append((block, 0, failure))
            elif block.directive == "not run":
                results.append((block, 0, f"not run: {block.argument}"))
            elif block.language in RUNNERS:
                jobs.setdefault((document.path, block.language), []).append(block)
    if jobs:
        with tempfile.TemporaryDirectory() as scratch:
            runner = Runner(args, scratch, files)
            for path in {path for path, language in jobs if language in ("sh", "python")}:
                runner.repository(path)
            with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
                futures = [pool.submit(runner.outcomes, language, blocks)
                           for (_, language), blocks in sorted(jobs.items(), key=lambda job: -len(job[1]))]
                for future in futures:
                    results += future.result()
    return sorted(results, key=lambda result: (result[0].path, result[0].line))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", help="build tree to install from")
    parser.add_argument("documents", nargs="*", help="relative to the repository's root")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--generator", default="Ninja")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    args.build = os.path.abspath(args.build)

    names = repository_files()
    paths = args.documents or [name for name in names if re.fullmatch(r"(README|docs/.*)\.md", name)]
    documents = {path: Document(path) for path in paths}
    unclear = [fault for document in documents.values() for fault in document.faults]
    if unclear:  # so that nothing runs that was not meant to
        sys.exit("\n".join(unclear))
    faults = []
    folders = {"."}
    for name in names:
        while name := os.path.dirname(name):
            folders.add(name)
    for path in args.documents or [name for name in names if name.endswith(".md")]:
        faults += check_links(path, documents, {*names, *folders})
    faults += check_functions()

    skipped = 0
    for block, seconds, outcome in all_results(args, [documents[path] for path in paths], names):
        text = outcome or f"ok ({seconds:.1f} s)"
        if isinstance(outcome, Skipped):
            skipped += 1
            text = f"SKIPPED: {outcome}"
        elif isinstance(outcome, Failed):
            faults.append(f"{block.where()}: {outcome}")
            text = "FAILED, see below"
        print(f"{block.where():32} {block.language:8} {text}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 77 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
