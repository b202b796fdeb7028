"""Faults of a federation's processes, in one federation of four clients on this machine's loopback, with TLS and keys.

`python benchmarks/flower_faults.py each --repeat 10`: each of the faults of tests/flower/federation_faults.py again and
again. Printed: how often a time limit was met (a hang), how often anything else was not as expected, the longest time,
and the largest difference of x and y from those of the run without the absent.

`python benchmarks/flower_faults.py kills --times 30 --seed 0`: kill -9 for server, SuperLink, SuperNode or worker at
random moments of a run, while another process takes all cores. Printed, a line for each: who was killed, in which
exchange and how many seconds after it began, the seconds to the end of the first exchange begun afterwards, the
largest difference of x and y, at the end of the run, from those of the undisturbed run. A run has six kills.
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

import flower_kills as kills  # noqa: E402
from fedbilevel.flower.launch import children  # noqa: E402

BUSY = "import os\nfor _ in range(os.cpu_count() - 1):\n    if os.fork() == 0:\n        break\nwhile True:\n    pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    each = commands.add_parser("each", help="each fault again and again")
    each.add_argument("faults", nargs="*", default=list(FAULTS), help=", ".join(FAULTS))
    each.add_argument("--repeat", type=int, default=10)
    each.set_defaults(play=play_each)
    killing = commands.add_parser("kills", help="kill -9 at random moments, under load")
    killing.add_argument("--times", type=int, default=30)
    killing.add_argument("--seed", type=int, default=0)
    killing.set_defaults(play=play_kills)
    for command in (each, killing):
        command.add_argument("--first-port", type=int, help="take free ports from here upwards; otherwise any")
    options = parser.parse_args()
    options.play(options)


def play_each(options: argparse.Namespace) -> None:
    """Every fault, so many times."""
    print(f"{'fault':32} runs hangs other  worst s  difference  load", flush=True)
    with tempfile.TemporaryDirectory() as folder, Trial(Path(folder), options.first_port) as trial:
        for fault in options.faults:
            print(f"{fault:32} {row(trial, fault, options.repeat)}", flush=True)
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


def play_kills(options: argparse.Namespace) -> None:
    """So many kills, some in each run."""
    held = 0
    with tempfile.TemporaryDirectory() as folder, Trial(Path(folder), options.first_port, None) as trial:
        busy = children.spawn([sys.executable, "-c", BUSY])
        try:
            expected, typical = kills.undisturbed(trial)
            print(f"undisturbed: {typical:.2f} s an exchange\n{HEAD}", flush=True)
            for moments in kills.plan(options.times, options.seed, typical):
                good, lines = outcomes(trial, moments, expected)
                held += good
                print("\n".join(lines), flush=True)
        finally:
            children.stop([busy], grace=0)
    print(f"{held} of {options.times} went on to the numbers of the undisturbed run; left:", trial.left() or "nothing")


HEAD = f"{'killed':22} {'round':>5} {'exchange':>8} {'after s':>7} {'to go on s':>10} {'difference':>10} {'load':>5}"


def outcomes(trial: Trial, moments: list[kills.Moment], expected: list) -> tuple[int, list[str]]:
    """How many of a run's kills it went on after to what is expected, and a line for each."""
    try:
        seconds, difference = kills.play(trial, moments, expected)
    except Exception as error:  # noqa: BLE001  told; the next run is to be had all the same
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        trial.renew()
        return 0, [f"{moment} {type(error).__name__:>10}" for moment in moments]
    end = f"{difference:10.1e} {os.getloadavg()[0]:5.1f}"
    lines = [f"{moment} {took:10.1f} {end}" for moment, took in zip(moments, seconds, strict=True)]
    return len(moments) * (difference <= SAME), lines


if __name__ == "__main__":
    main()
