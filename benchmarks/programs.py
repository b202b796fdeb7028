"""The programs that XLA makes of the library's rounds and of hand-written rounds: instructions, kernels, loops, bytes.

The problems and the numbers of rounds are the same as in floor.py. Each contender runs in a process of its own, in
which XLA and JAX write every compiled program to files. The largest program contains the rounds, and the table
describes it:

instructions   of the optimized HLO, those inside fusions and loops included
kernels        functions that XLA compiles to machine code; on a CPU only
fusions, loops, dots
               instructions of the optimized HLO: fusion; while; dot
HLO, StableHLO kB of text: of the optimized program, and of what JAX gives to the compiler
programs       how many are compiled in all, the many of a single operation included
"""

import os
import re
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from benchmarks import floor
from benchmarks.harness import head, in_process, row

OPTIMIZED = "after_optimizations.txt"
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)
TINY = ("simfbo-quadratic-6", "fednest-quadratic-6")
QUICK = {"rows": TINY[:1]}


def first_call(name: str, who: str) -> None:
    """Call one contender in this process."""
    s = floor.ROWS[name]
    p = floor.problem_of(s, np.float32)
    contender = floor.of_library(s, p)[1] if who == "library" else floor.hand_written(s, p)
    contender(1.0, 0, s.rounds)


def counted(name: str, who: str) -> list[object]:
    """Return the counts of one contender, in the order of the columns."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        in_process(first_call, name, who, environment={"XLA_FLAGS": flags, "JAX_DUMP_IR_TO": folder})
        files = [(path, path.stat().st_size) for path in Path(folder).iterdir()]
        programs = [(size, path) for path, size in files if path.name.endswith(OPTIMIZED)]
        size, largest = max(programs)
        found = Counter(INSTRUCTION.findall(largest.read_text()))
        module = largest.name.split(".")[0]
        kernels = sum(path.match(f"{module}.*.ir-with-opt.ll") for path, _ in files)
        stable = max(size for path, size in files if path.suffix == ".mlir")
        parts = found["fusion"], found["while"], found["dot"]
        return [found.total(), kernels, *parts, f"{size / 1e3:.0f}", f"{stable / 1e3:.0f}", len(programs)]


def main(rows: tuple[str, ...] = TINY) -> None:
    counts = "instructions", "kernels", "fusions", "loops", "dots", "HLO, kB", "StableHLO, kB", "programs"
    head("row", "contender", *counts)
    for name in rows:
        for who in ("library", "peer"):
            row(name, who, *counted(name, who))
