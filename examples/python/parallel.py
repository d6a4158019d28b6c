"""Independent pieces of work side by side, in one thread for each core, up to 32.

NumPy and the library let go of Python's lock while they compute. Matrix products use one thread each
then; the BLAS reads that once, so this module is imported before NumPy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

for _name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The function's results in the order of the items, each as soon as it is there."""
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 32)) as executor:
        yield from executor.map(function, items)
