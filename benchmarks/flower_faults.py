"""Each fault of a federation's processes again and again: `python benchmarks/flower_faults.py --repeat 10`.

The faults are those of tests/flower/federation_faults.py, in one federation of four clients on this machine's
loopback, with TLS and keys. Printed: how often a time limit was met (a hang), how often anything else was not as
expected, the longest time, and the largest difference of x and y from those of the run without the absent.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "flower"), str(TESTS / "engines")]

from federation_app import SAME, Hang, Trial  # noqa: E402
from federation_faults import FAULTS  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("faults", nargs="*", default=list(FAULTS), help=", ".join(FAULTS))
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--first-port", type=int, default=24500)
    options = parser.parse_args()
    print(f"{'fault':28} runs hangs other  worst s  difference  load", flush=True)
    with tempfile.TemporaryDirectory() as folder, Trial(Path(folder), options.first_port) as trial:
        for fault in options.faults:
            print(f"{fault:28} {row(trial, fault, options.repeat)}", flush=True)
    print("left:", trial.left() or "nothing")


def row(trial: Trial, fault: str, repeat: int) -> str:
    """What came of so many trials of a fault."""
    hangs, others, seconds, differences = 0, 0, [0.0], [0.0]
    for _ in range(repeat):
        began = time.monotonic()
        try:
            differences.append(FAULTS[fault](trial))
            others += differences[-1] > SAME
            seconds.append(time.monotonic() - began)
        except Exception as error:  # noqa: BLE001  counted and told; the next trial is to be had all the same
            print(f"{fault}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            hangs += isinstance(error, Hang)
            others += not isinstance(error, Hang)
            trial.renew()
    load = os.getloadavg()[0]
    return f"{repeat:4} {hangs:5} {others:5} {max(seconds):8.1f}  {max(differences):10.1e}  {load:4.1f}"


if __name__ == "__main__":
    main()
