"""The number of kernels that XLA compiles for the library's rounds and for hand-written rounds, on a CPU.

The problems and the numbers of rounds are the same as in floor.py. Each contender runs in a process of its own, in
which XLA writes every compiled program to files. The largest program contains the rounds, and its kernels are counted:
the functions that XLA compiles to machine code.
"""

import os
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import floor
from benchmarks.harness import head, in_process, row

OPTIMIZED = "after_optimizations.txt"
TINY = ("simfbo-quadratic-6", "fednest-quadratic-6")
QUICK = {"rows": TINY[:1]}


def first_call(name: str, who: str) -> None:
    """Call one contender in this process."""
    s = floor.ROWS[name]
    floor.CONTENDERS[who](s, floor.problem_of(s, np.float32))(1.0, 0, s.rounds)


def kernels(name: str, who: str) -> int:
    """Return the number of kernels of one contender."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        in_process(first_call, name, who, environment={"XLA_FLAGS": flags})
        programs = [path for path in Path(folder).iterdir() if path.name.endswith(OPTIMIZED)]
        module = max(programs, key=lambda path: path.stat().st_size).name.split(".")[0]
        return len(list(Path(folder).glob(f"{module}.*.ir-with-opt.ll")))


def main(rows: tuple[str, ...] = TINY) -> None:
    head("row", "library", "by hand", "ratio")
    for name in rows:
        library, peer = (kernels(name, who) for who in floor.CONTENDERS)
        row(name, library, peer, f"{library / peer:.2f}")
