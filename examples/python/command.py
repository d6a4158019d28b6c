"""What the programs that measure have in common on the command line; nothing beyond Python is needed."""

from __future__ import annotations

import argparse
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = ("--wheel", "--cache", "--program")  # where a machine keeps what a run needs
T = TypeVar("T")


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Exit with what the program returns; what it cannot do is a line, not a traceback."""
    try:
        status = main(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        name, *words = map(str, error.cmd)
        fail(f"{shlex.join([Path(name).name, *words])} failed with exit code {error.returncode}")
    except (ValueError, OSError, RuntimeError, OverflowError) as error:
        fail(error)
    sys.exit(status)


def fail(reason: object) -> NoReturn:
    """Exit with the program's name and a reason."""
    sys.exit(f"{Path(sys.argv[0]).stem}: {reason}")


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers that are not below `least`."""
    def parse(argument: str) -> int:
        try:
            number = int(argument)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{argument!r} is no whole number of at least {least}")
        return number

    return parse


def positive(argument: str) -> float:
    """Parse a number above 0."""
    try:
        number = float(argument)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{argument!r} is no number above 0")
    return number


def list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A parser of comma-separated lists."""
    return lambda argument: [parse(part) for part in argument.split(",")]


def existing_file(argument: str) -> Path:
    """Parse the path of a file that is there."""
    path = Path(argument)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {argument}")
    return path


def make_writable(path: Path) -> None:
    """Make its folder, and fail before the measuring if the file cannot be written; it stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    present = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not present:
        path.unlink()


def recorded(argv: Sequence[str], default_out: Path | None = None) -> str:
    """The command line as it can be repeated in the root of the repository, for a report.

    Without what only this machine has, and without an --out that is the default; of files outside of
    the repository only the name.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    kept: list[str] = []
    for index, word in enumerate(words):
        option = words[index - 1] if index else ""
        is_default = default_out is not None and "--out" in (word, option) \
            and Path(words[words.index("--out") + 1]).resolve() == default_out.resolve()
        if not is_default and word not in PRIVATE and option not in PRIVATE:
            kept.append(_portable(word) if "/" in word else word)
    return shlex.join(["python3", f"examples/python/{Path(sys.argv[0]).name}", *kept])


def _portable(word: str) -> str:
    path = Path(word).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
