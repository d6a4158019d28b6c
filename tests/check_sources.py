#!/usr/bin/env python3
"""Rules for the text of the repository that no compiler checks.

1. Device code (ptx/) includes nothing from outside: no #include with angle brackets.
2. Includes in ptx/ point downwards only: kernels -> tile -> arch -> common.
3. No file names a folder of somebody's machine.
"""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LAYERS = ["common", "arch", "tile", "kernels"]
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:<([^>]*)>|"([^"]*)"|(.*))', re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:work|root|home)(?:/|\b)")


def repository_files():
    """Tracked files and new ones that git does not ignore; without git, all but build trees."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        names = [name for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = []
        for folder, folders, files in os.walk(ROOT):
            folders[:] = [f for f in folders if f not in (".git", "build", "__pycache__")]
            names += [os.path.relpath(os.path.join(folder, f), ROOT) for f in files]
    return sorted(name for name in names if os.path.isfile(os.path.join(ROOT, name)))


def layer_of(path):
    parts = path.split("/")
    return LAYERS.index(parts[1]) if len(parts) > 2 and parts[1] in LAYERS else None


def check_device_includes(path, text):
    own = layer_of(path)
    for match in INCLUDE.finditer(text):
        where = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
        system, quoted, other = match.groups()
        if quoted is None:
            yield f"{where}: device code may not include {system or other.strip()}"
            continue
        target = quoted
        if not target.startswith("ptx/"):
            target = os.path.normpath(os.path.join(os.path.dirname(path), quoted))
        if not os.path.isfile(os.path.join(ROOT, target)):
            yield f"{where}: no file {target}"
        elif layer_of(target) is None or own is not None and layer_of(target) > own:
            yield f"{where}: {target} is not below {path} ({' <- '.join(LAYERS)})"


def main():
    faults = []
    for path in repository_files():
        with open(os.path.join(ROOT, path), "rb") as file:
            data = file.read()
        if b"\0" in data:
            continue
        text = data.decode("utf-8", errors="replace")
        if path.startswith("ptx/") and path.endswith((".h", ".cuh", ".cu", ".def")):
            faults += check_device_includes(path, text)
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                faults.append(f"{path}:{number}: path of a machine: {line.strip()[:100]}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
