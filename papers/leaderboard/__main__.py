"""`python -m papers.leaderboard`: rank methods in every task of board.toml at every budget.

No step sizes are chosen: the steps of all methods adapt. Every seed is run until all budgets are spent. At each budget,
the metric is read in the last row whose cost is within the budget.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel import experiments
from fedbilevel.authoring import History
from papers import page
from papers.__main__ import reported, seeds
from papers.claims import interval, state_of
from papers.figure import merged
from papers.numbers import UNITS, rounded, text
from papers.play import Run, Say, play_all, prepare, word, write

HERE = Path(__file__).parent
OUT = Path("runs/papers/leaderboard")
NO_SPEC = ("metric", "budgets", "log", "methods")
STEPS = ("lr", "step", "client_lr", "outer_lr")  # fields for which None means a step that adapts
Ranks = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""By task, cost and method: the rank, the place and the readings."""


def tables(board: Mapping[str, Any], task: str, method: str) -> dict[str, Any]:
    """Return the tables of the spec of a method in a task: the preset, with steps that adapt."""
    whole: dict[str, Any] = reduce(merged, [board["spec"], board["panels"][task], board["methods"][method]], {})
    whole = {name: table for name, table in whole.items() if name not in NO_SPEC}
    preset = experiments.resolve(whole).tables()["algorithm"]
    return merged(whole, {"algorithm": without_steps(preset)})


def without_steps(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return "none" for all step sizes among the fields of a method and its parts, also those by x, y and v."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in STEPS or (isinstance(value, Mapping) and set(value) == set("xyv")):
            found[name] = "none"
        elif isinstance(value, Mapping) and (steps := without_steps(value)):
            found[name] = steps
    return found


def play(board: Mapping[str, Any], out: Path, seeds: Sequence[int], say: Say = print) -> dict[str, Any]:
    """Bring all runs to their end. Return the outcome in a form that JSON can store."""
    ranks, errors = {}, dict[str, str]()
    for task, panel in board["panels"].items():
        histories: dict[str, list[History | None]] = {}
        for method in panel.get("methods", board["methods"]):
            runs = [run_of(board, task, method, out, seed) for seed in seeds]
            played = play_all(runs, say)
            came = [played[run.folder] for run in runs]
            histories[method] = [None if isinstance(one, str) else one for one in came]
            errors |= {run.name: one for run, one in zip(runs, came, strict=True) if isinstance(one, str)}
        ranks[task] = ranks_of(panel, panel.get("metric", board["metric"]), histories)
    return {"date": time.strftime("%Y-%m-%d"), "seeds": list(seeds), "errors": errors, "ranks": rounded(ranks)}


def run_of(board: Mapping[str, Any], task: str, method: str, out: Path, seed: int) -> Run:
    """Return a run that ends when all budgets are spent."""
    folder = out / word(task) / word(method) / f"seed-{seed}"
    budgets = board["panels"][task]["budgets"]
    return Run(f"{task} · {method} · seed {seed}", tables(board, task, method), seed, folder, budgets)


def ranks_of(
    panel: Mapping[str, Any], metric: str, runs: Mapping[str, Sequence[History | None]]
) -> dict[str, dict[str, Any]]:
    """Return, for each budget and method: the rank, the place by the mean alone, and the metric of each seed.

    A method that fails with some seed has neither rank nor place.
    """
    whole = {name: [one for one in side if one is not None] for name, side in runs.items() if None not in side}
    larger = next((one.larger_is_better(metric) for side in whole.values() for one in side), True)
    found = {}
    for cost, amount in panel["budgets"].items():
        read = {name: [read_at(one, metric, cost, amount) for one in side] for name, side in whole.items()}
        placed = ranked(read, larger, panel.get("log", False))
        means = {name: float(np.mean(values)) * (1 if larger else -1) for name, values in read.items()}
        places = {name: 1 + sum(other > mean for other in means.values()) for name, mean in means.items()}
        found[cost] = {
            name: {"rank": placed.get(name), "place": places.get(name), "values": read.get(name, [])} for name in runs
        }
    return found


def read_at(history: History, metric: str, cost: str, amount: float) -> float:
    """Return the metric in the last row whose cost is at most `amount`."""
    return float([row[metric] for row in history.rows if experiments.costs_of(row)[cost] <= amount][-1])


def ranked(values: Mapping[str, Sequence[float]], larger: bool, log: bool) -> dict[str, int]:
    """Return the rank of each method: one more than the number of methods that are certainly better.

    A method is certainly better if the confidence interval of the difference, paired by seed, is above 0. With
    `log`, logarithms are compared, if all values are above 0.
    """
    log = log and all(value > 0 for side in values.values() for value in side)
    sign = 1 if larger else -1
    scaled = {k: np.array([sign * (math.log10(one) if log else one) for one in side]) for k, side in values.items()}

    def surely(better: np.ndarray, than: np.ndarray) -> bool:
        return state_of(*interval((better - than).tolist()), None) == "holds"

    return {name: 1 + sum(surely(other, one) for other in scaled.values()) for name, one in scaled.items()}


def overview(ranks: Ranks) -> list[list[str]]:
    """Return the rows of a table: a method, its mean place, how often it is level with the best, and its ranks by task.

    The rows are in the order of the mean place; methods that are run on fewer tasks come last. The place is by the mean
    of the metric: a method whose seeds scatter is level with all others, but not well placed. A method that fails has
    the last place.
    """
    at = [one for of in ranks.values() for one in of.values()]
    own = {name: [one[name] for one in at if name in one] for name in dict.fromkeys(name for one in at for name in one)}
    place = {name: float(np.mean([one[name]["place"] or len(one) for one in at if name in one])) for name in own}
    return [
        [
            name,
            f"{place[name]:.1f}",
            f"{sum(one['rank'] == 1 for one in own[name])} of {len(own[name])}",
            *(" ".join(str(one[name]["rank"] or "–") for one in of.values() if name in one) for of in ranks.values()),
        ]
        for name in sorted(own, key=lambda name: (-len(own[name]), place[name]))
    ]


def written(board: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the text of the page: its head, which is written by hand, and the table below the mark."""
    head = (HERE / "README.md").read_text("utf-8").partition(page.MARK)[0]
    lines = [f"| method | mean place | level with the best | {' | '.join(found['ranks'])} |"]
    lines += [f"|{'---|' * (3 + len(found['ranks']))}"]
    lines += [f"| {' | '.join(row)} |" for row in overview(found["ranks"])]
    lines += ["", "The budgets of each task, in the order of its ranks:", ""]
    for task in found["ranks"]:
        budgets = board["panels"][task]["budgets"].items()
        lines.append(f"- {task}: {', '.join(f'{text(c, n)} {UNITS.get(c, c)}' for c, n in budgets)}")
    lines += ["", f"Seeds {', '.join(map(str, found['seeds']))}; {found['date']}; [numbers](board.json).", ""]
    lines += [f"- {what}: {why}" for what, why in found["errors"].items()]
    return f"{head}{page.MARK}\n" + "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser("python -m papers.leaderboard", description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2], metavar="N,N,…", help="(0,1,2)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"({OUT})")
    return reported(partial(keep, parser.parse_args(arguments)))


def keep(given: argparse.Namespace) -> None:
    """Run the board, and write its outcome and the page."""
    board = tomllib.loads((HERE / "board.toml").read_text("utf-8"))
    prepare(1)
    found = play(board, given.out, given.seeds)
    write(HERE / "board.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    write(HERE / "README.md", written(board, found))


if __name__ == "__main__":
    sys.exit(main())
