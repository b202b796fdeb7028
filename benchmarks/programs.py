"""What XLA makes of the library's rounds beside the hand-written ones: instructions, kernels, loops, products, bytes.

    .venv/bin/python benchmarks/programs.py [--rows NAME ...] [--out FILE]

The rows are those of benchmarks/floor.py, with as many rounds. Each contender is a process of its own, in which XLA
and JAX write down all that they compile; counted is the largest program, which holds the rounds:

instructions   of the optimized HLO, those inside fusions and loops included
kernels        functions that XLA compiles to machine code; on a CPU only
fusions, loops, dots
               instructions of the optimized HLO: fusion; while; dot
HLO, StableHLO bytes of text: of the optimized program, and of what JAX hands to the compiler
programs       how many are compiled in all, the many of a single operation included
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax
import numpy as np

import floor
from machine import describe

CONTENDERS = ("library", "peer")
OPTIMIZED = "after_optimizations.txt"
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)
HEAD = "| row | who | instructions | kernels | fusions | loops | dots | HLO, kB | StableHLO, kB | programs |"


def play(name: str, who: str) -> None:
    """A first call of one contender, in this process."""
    jax.config.update("jax_enable_compilation_cache", False)
    s = floor.ROWS[name]
    p = floor.problem_of(s, np.float32)
    contender = floor.of_library(s, p)[1] if who == "library" else floor.hand_written(s, p)
    contender(1.0, 0, s.rounds)


def counted(name: str, who: str) -> dict[str, int]:
    """The counts of one contender, which is played in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_DUMP_IR_TO": folder}
        command = [sys.executable, __file__, "--rows", name, "--contender", who]
        subprocess.run(command, check=True, env=environment)
        files = [(path, path.stat().st_size) for path in Path(folder).iterdir()]
        programs = [(size, path) for path, size in files if path.name.endswith(OPTIMIZED)]
        size, largest = max(programs)
        found = Counter(INSTRUCTION.findall(largest.read_text()))
        module = largest.name.split(".")[0]
        return {
            "instructions": found.total(),
            "kernels": sum(path.match(f"{module}.*.ir-with-opt.ll") for path, _ in files),
            "fusions": found["fusion"],
            "loops": found["while"],
            "dots": found["dot"],
            "hlo_bytes": size,
            "stablehlo_bytes": max(size for path, size in files if path.suffix == ".mlir"),
            "programs": len(programs),
        }


def line(name: str, who: str, found: dict[str, int]) -> str:
    texts = [f"{value / 1e3:.0f}" if key.endswith("bytes") else str(value) for key, value in found.items()]
    return f"| {' | '.join([name, who, *texts])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = ["simfbo-quadratic-6", "fednest-quadratic-6"]
    parser.add_argument("--rows", nargs="+", choices=floor.ROWS, default=tiny, metavar="NAME", help=" ".join(tiny))
    parser.add_argument("--out", type=Path, help="write the counts here as JSON, too")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        return play(options.rows[0], options.contender)
    print(describe(), "", HEAD, "|---|---" + "|---:" * 8 + "|", sep="\n", flush=True)
    found = {name: {who: counted(name, who) for who in CONTENDERS} for name in options.rows}
    for name, row in found.items():
        for who, counts in row.items():
            print(line(name, who, counts))
    text = json.dumps(found)
    print("", text, sep="\n")
    if options.out:
        options.out.write_text(text)
    return None


if __name__ == "__main__":
    main()
