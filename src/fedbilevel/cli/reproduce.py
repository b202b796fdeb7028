"""`fedbilevel reproduce`: the papers' figures and tables, each by its id."""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.cli.shared import INTERRUPTED, NUMBERS_FAIL, OK, Add, console, fail, prepare_jax, seeds

if TYPE_CHECKING:
    from fedbilevel.reproduce.entry import Entry, Scale

EPILOG = """\
An entry is a figure or table of a paper: what the paper did and found, what is run here, and the claims that decide,
written before the runs. Steps of every method are chosen by as many trials on held-out data; then every method is run
with every seed. A claim holds if the 95 % confidence interval of the difference, paired by seed, says so.

  fedbilevel reproduce --list
  fedbilevel reproduce simfbo-3
  fedbilevel reproduce all --workers 2 --out runs/reproduce
  fedbilevel reproduce fednest-2a --full --rehearse     one round of each method in the paper's own setting

An interrupted entry goes on where it was. Data sets are read from $FEDBILEVEL_DATA or downloaded.
"""
ALL = "all"
AGAIN = "interrupted; the same command goes on where it was"


def add_to(add: Add) -> None:
    """The command."""
    reproduce = add("reproduce", _reproduce, "run a figure or table of a paper, and say whether it holds", EPILOG)
    reproduce.add_argument("ids", nargs="*", metavar="ID", help="see --list; a paper's name takes its entries; or all")
    reproduce.add_argument(
        "--list",
        action="store_true",
        help="entries (all, or those of ID) with the state of the last run, yours or kept",
    )
    scale = reproduce.add_mutually_exclusive_group()
    scale.add_argument("--quick", action="store_true", help="minutes on two cores (the default)")
    scale.add_argument("--full", action="store_true", help="the paper's own setting, for a GPU")
    reproduce.add_argument("--seeds", type=seeds, metavar="N,N,…", help="of the runs (0,1,2)")
    reproduce.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that play an entry side by side (1)"
    )
    reproduce.add_argument("--out", type=Path, default=Path("runs/reproduce"), metavar="DIR", help="(runs/reproduce)")
    reproduce.add_argument("--rehearse", action="store_true", help="play one round of each method, and no more")
    reproduce.add_argument("--report", action="store_true", help="write a page for people about each, and one over all")
    reproduce.add_argument("--quiet", action="store_true", help="print nothing but the outcome")


def _reproduce(options: argparse.Namespace) -> int:
    from fedbilevel.core.errors import ConfigurationError

    scale: Scale = "full" if options.full else "quick"
    if options.list:
        console().print(_listing(_entries(options.ids or [ALL]), scale, options.out))
        return OK
    if not options.ids:
        raise ConfigurationError("which entry? fedbilevel reproduce --list names them")
    if options.report and not options.rehearse:
        from fedbilevel.engines.curves import require_matplotlib

        require_matplotlib()
    entries = _entries(options.ids)
    code = OK
    try:
        if len(entries) > 1:
            code = _each(entries, options)
        else:
            _one(entries[0], scale, options)
    except KeyboardInterrupt:
        return fail(INTERRUPTED, AGAIN)
    if options.report and not options.rehearse and code != INTERRUPTED:
        _report(options.out)
    return code


def _each(entries: list[Entry], options: argparse.Namespace) -> int:
    """Every entry in a process of its own, whose devices and memory are its own."""
    flags = ["--full"] * options.full + ["--rehearse"] * options.rehearse + ["--quiet"] * options.quiet
    flags += ["--workers", str(options.workers)]
    flags += ["--seeds", ",".join(map(str, options.seeds))] if options.seeds else []
    failed = []
    for entry in entries:
        command = [sys.executable, "-m", "fedbilevel.cli", "reproduce", entry.id, *flags, "--out", str(options.out)]
        process = subprocess.Popen(command)
        try:
            code = process.wait()
        except KeyboardInterrupt:  # which the terminal sends to both: the entry's own process ends, and says so
            code = process.wait() or fail(INTERRUPTED, AGAIN)
        if code == INTERRUPTED:
            return code
        failed += [entry.id] if code else []
    return fail(NUMBERS_FAIL, f"failed: {', '.join(failed)}") if failed else OK


def _entries(asked: list[str]) -> list[Entry]:
    """The entries that are asked for, each once, in the order of the list."""
    from fedbilevel.core.errors import unknown
    from fedbilevel.reproduce.entry import load_all

    every = load_all()
    known = {ALL, *(name for entry in every for name in (entry.paper, entry.id))}
    for name in asked:
        if name not in known:
            raise unknown("entry", name, known)
    return [entry for entry in every if {ALL, entry.paper, entry.id} & set(asked)]


def _one(entry: Entry, scale: Scale, options: argparse.Namespace) -> None:
    terminal = console()
    from fedbilevel.experiments import plots
    from fedbilevel.reproduce import outcome, picture, protocol, workers

    def said(line: str) -> None:
        if not options.quiet:
            terminal.print(line, markup=False, highlight=False, soft_wrap=True)

    terminal.rule(f"{entry.id}: {entry.part}")
    begin = partial(_begin, protocol.devices_of(entry, scale))
    begin()
    if options.rehearse:
        return protocol.rehearse(entry, scale, options.out, said=said)
    drawn = plots.possible()
    given: dict[str, Any] = {"seeds": options.seeds or protocol.SEEDS, "said": said}
    if options.workers != 1:
        workers.play_ahead(entry, scale, options.out, **given, workers=options.workers, begin=begin)
        given["said"] = lambda line: None  # it has been said
    played = protocol.play(entry, scale, options.out, **given)
    found = outcome.outcome_of(played)
    file = outcome.file_of(entry, scale, options.out)
    outcome.keep(found, file.parent)
    if drawn:
        plots.save(picture.draw(entry, found), file.with_name("figure.png"))
    tables = [_ranks(entry, found, terminal.width)] if entry.ranked else []
    tables += [] if entry.ranked else [_numbers(entry, found, terminal.width), _claims(found, terminal.width)]
    for table in tables:
        terminal.print(table)
    terminal.print(f"{found['verdict']}  ({found['minutes']:.1f} minutes)  {file}", highlight=False, soft_wrap=True)
    return None


def _begin(devices: int) -> None:
    """Set what JAX reads at its first computation, in each process that plays."""
    from fedbilevel.engines.machine import tune_cpu

    prepare_jax()
    tune_cpu(devices)


def _report(out: Path) -> None:
    """Write the pages of all entries that have been played below `out`."""
    from fedbilevel.report.entries import write_index
    from fedbilevel.reproduce.entry import load_all

    index, *pages = write_index(load_all(), out)
    for path in (*pages, index):
        console().print(f"report {path}", markup=False, highlight=False, soft_wrap=True)


def _listing(every: list[Entry], scale: Scale, out: Path) -> Any:
    """Entries: what they show, how long they take, and the verdict of the last run: the user's own, or one kept."""
    from fedbilevel.core.errors import ConfigurationError
    from fedbilevel.experiments.layout import fitted
    from fedbilevel.reproduce.outcome import file_of, kept, read, state_of

    of_project = kept() if scale == "quick" else {}

    def state(entry: Entry) -> tuple[str, str, bool]:
        """The state, its date, and whether it is of the user's own run."""
        file = file_of(entry, scale, out)
        try:
            if file.is_file():
                found = read(file)
                return state_of(entry, found), found["date"], True
        except ConfigurationError:
            return "not readable", "", False
        if entry.id not in of_project:
            return "not run", "", False
        found = of_project[entry.id]
        return f"{state_of(entry, found)} (kept)", found["date"], False

    found = [state(entry) for entry in every]
    columns = {
        "id": [entry.id for entry in every],
        "part": [entry.part for entry in every],
        "shows": [entry.title for entry in every],
        "takes": [entry.size(scale).takes for entry in every],
        "state": [came for came, *_ in found],
        "on": [date for _, date, _ in found],
    }
    notes = [f"{sum(own for *_, own in found)} of {len(every)} entries have been run in {out}, scale {scale}."]
    if any(came.endswith("(kept)") for came in columns["state"]):
        notes.append("(kept): not run there; that is what came of the project's own run.")
    return fitted("Figures and tables", columns, console().width, texts=list(columns), droppable=("on",), notes=notes)


def _numbers(entry: Entry, found: dict[str, Any], width: int) -> Any:
    """The metric of each method in each panel: at the end, or what a slope is fitted to."""
    from fedbilevel.experiments.layout import fitted
    from fedbilevel.reproduce.picture import numbers_of

    columns, besides = numbers_of(entry, found)
    seeds = ", ".join(map(str, found["seeds"]))
    notes = [f"Mean ± standard deviation over seeds {seeds} at the end of the runs{besides}."]
    return fitted(f"{entry.title}: {entry.metric}", columns, width, texts=["method"], notes=notes)


def _ranks(entry: Entry, found: dict[str, Any], width: int) -> Any:
    """The rank of each method in each panel, at each budget."""
    from fedbilevel.experiments.layout import fitted
    from fedbilevel.reproduce.ranking import budget_in_words, overview

    budgets = {panel: entry.panels[panel].budgets for panel in found["ranks"]}
    at = [
        f"{panel}: {', '.join(budget_in_words(cost, amount) for cost, amount in of.items())}."
        for panel, of in budgets.items()
    ]
    notes = ["Ranks at each budget; what cannot be told apart from the best is first, too (95 %).", *at]
    notes += [f"{what}: {why}" for what, why in found["errors"].items()]
    return fitted(entry.title, overview(found["ranks"]), width, texts=["method"], notes=notes)


def _claims(found: dict[str, Any], width: int) -> Any:
    """What came of each claim."""
    from fedbilevel.experiments.layout import fitted
    from fedbilevel.reproduce.outcome import difference_in_words, methods_in_words

    rows = found["findings"]
    columns = {
        "claim": [one["says"] for one in rows],
        "panel": [one["panel"] for one in rows],
        "methods": [methods_in_words(one) for one in rows],
        "difference": [difference_in_words(one) for one in rows],
        "state": [one["state"] for one in rows],
    }
    notes = dict.fromkeys(f"{one['note']}." for one in rows if one["note"])
    return fitted("Claims", columns, width, texts=["claim", "panel", "methods", "state"], notes=notes)
