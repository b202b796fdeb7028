"""Define the commands for several runs.

`fedbilevel compare` shows finished runs side by side, or first runs several algorithms on one task. `fedbilevel report`
writes a web page about runs. `fedbilevel sweep` makes runs with different values of some fields, and chooses the best.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.cli import shared
from fedbilevel.cli.run import played
from fedbilevel.core import interrupts
from fedbilevel.core.errors import ConfigurationError, NumericalError, require
from fedbilevel.experiments.names import RIVALS

if TYPE_CHECKING:
    from fedbilevel.experiments import Spec
    from fedbilevel.experiments.sweep import SpecOf
    from fedbilevel.sweeps import PointValues, Sweep
    from fedbilevel.tasks import Task
    from fedbilevel.trackers import Tracker


FORMATS = {"csv": "CSV", "json": "JSON", "latex": "LaTeX", "markdown": "Markdown"}


def add_to(add: shared.Add) -> None:
    compare = add("compare", _compare)
    compare.add_argument("what", nargs="*", metavar="RUN|TASK", help="folders of runs, or one task")
    compare.add_argument(
        "--algorithms",
        type=shared.names,
        metavar="NAME,NAME,…",
        help=f"the algorithms to run on the task; {shared.OWN}",
    )
    shared.add_options(compare, "data", "set", "cohort", seeds="one run of each algorithm for each seed")
    shared.add_length(compare)
    compare.add_argument(
        "--centralised",
        action="store_true",
        help="also run the first algorithm with one client that has all samples, drawn as a horizontal line",
    )
    searches = partial(shared.some_names, kind="search", allowed=RIVALS)
    compare.add_argument(
        "--against", type=searches, metavar="NAME,NAME,…", help=f"also run searches over x: {', '.join(RIVALS)}"
    )
    compare.add_argument(
        "--search-box", metavar="LOW:HIGH", help="the bounds of every entry of x in these searches: --search-box=-12:0"
    )
    shared.add_options(compare, "log", quiet="do not show the progress of the runs")
    out = "for runs: the picture, .png, .pdf or .svg (comparison.png); with --algorithms: the folder (runs/…)"
    compare.add_argument("--out", metavar="PATH", help=out)
    compare.add_argument(
        "--panel", type=shared.names, metavar="NAME,NAME,…", help="the horizontal axes of the picture's panels"
    )
    compare.add_argument(
        "--label", type=_label, action="append", default=[], metavar="NAME=TEXT", help="the label of a run"
    )
    compare.add_argument(
        "--columns", type=shared.names, metavar="NAME,NAME,…", help="the columns of the table, by their headings"
    )
    compare.add_argument(
        "--levels", type=_levels, metavar="N,N,…", help="values of the metric; the table shows the exchanges to each"
    )
    compare.add_argument("--size", type=_size, metavar="WxH", help="the size of the picture, in inches")
    for name, text in FORMATS.items():
        compare.add_argument(f"--{name}", action="store_true", help=f"also write {text}, beside the picture")
    report = add("report", _report)
    report.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="the folder of a run or of several")
    report.add_argument("--out", type=Path, metavar="FILE", help="the file of the page, .html (report.html)")
    _add_sweep(add)


def _levels(text: str) -> list[float]:
    return [shared.positive(part, "the metric") for part in text.split(",")]


def _label(text: str) -> tuple[str, str]:
    name, _, said = (part.strip() for part in text.partition("="))
    if not (name and said):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=TEXT")
    return name, said


def _size(text: str) -> tuple[float, float]:
    width, _, height = text.lower().partition("x")
    try:
        return float(width), float(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 3.3x2.6, width x height in inches") from None


def _compare(options: argparse.Namespace) -> int:
    """Compare finished runs, or run several algorithms and compare them.

    two ways:
      fedbilevel compare RUN RUN …                    make a table and a picture of finished runs
      fedbilevel compare TASK --algorithms A,B,C      first run A, B and C on the same task and seeds

    A RUN is the folder of a run, or a folder with runs at any depth, such as the folder of --seeds or of the second
    way.
    If runs differ in more than the method, such as in the task's objective, make each of them with
    `fedbilevel run --out FOLDER/NAME`, then `fedbilevel compare FOLDER`. GFLOP are shown if all runs counted them.

    for a paper, with either way:
      fedbilevel compare FOLDER --out fig.pdf --panel exchanges --size 3.3x2.6 --latex
      --panel NAME,NAME   a panel for each: rounds, exchanges, megabytes, evaluations (gradients + hvps), gflop,
                          seconds (of this machine), time (of the clock); per_client or per_client:NAME for metrics
                          of single clients, if they were measured (run.metrics_per_client=true)
      --label NAME=TEXT   show TEXT in tables and pictures in place of the run's name
      --columns, --levels the columns of the table ("final,exchanges to 0.1"), and the values of the metric to which
                          exchanges are counted
      --size WxH          the size of the picture in inches; it has no title, and small type below 5 inches of width
      --csv, --json, --latex, --markdown write files beside the picture, with its name (fig.csv, …):
        .csv              a line for each run;  -curves.csv: a line for each row of each run's history
        .json             both, with mean and standard deviation of each method
        .tex              a booktabs tabular: mean ± standard deviation, the best in bold
        .md               the printed table, the best in bold

    settings for the second way:
      --set algorithm.local_steps=10    for every algorithm that has such a field
      --set fednest.inner.lr=0.1        for that algorithm only
      --set task.clients=50             for all, as are run.…, engine.…, clock.… (see `fedbilevel run --help`)

    comparison with hyperparameter search at the same budget, if x has at most 1,000 entries:
      fedbilevel compare TASK --algorithms A --against random,tpe,halving,fedex --exchanges N --search-box=-12:0
      Each method spends the budget, --exchanges, --bytes or --evaluations, and so do all trials of a search together.
      random, tpe, halving: Optuna draws x, y is trained at this x, and the outer loss on all samples judges it;
      fedex: the method of that name. Set fields of a search by its class: --set TPE.trial_exchanges=40

    Methods make different numbers of exchanges per round: --exchanges gives all the same number, --rounds does not. If
    some methods do not wait for slow clients, use --time with a clock (--set clock.stragglers=5).
    The same command with the same --out runs what is missing: after Ctrl-C, with more seeds or with more algorithms.
    """
    from fedbilevel.display.curves import require_matplotlib, require_size
    from fedbilevel.experiments.compare import is_per_client

    of_picture = [options.panel, options.size, options.out if options.algorithms is None else None]
    if any(one is not None for one in of_picture):  # with these options, a picture is drawn
        require_matplotlib()
    for panel in options.panel or []:
        is_per_client(panel)
    if options.size is not None:
        require_size(options.size)
    return _runs(options) if options.algorithms is None else _algorithms(options)


def _formats(options: argparse.Namespace) -> list[str]:
    return [name for name in FORMATS if getattr(options, name)]


def _runs(options: argparse.Namespace) -> int:
    others = (
        "seeds",
        "rounds",
        "exchanges",
        "bytes",
        "evaluations",
        "time",
        "cohort",
        "data",
        "set",
        "centralised",
        "against",
        "search_box",
        "log",
    )
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(options, name)]:
        raise ConfigurationError(f"{', '.join(given)}: only allowed with --algorithms")
    if not options.what:
        raise ConfigurationError("compare needs one or more run folders, or a task with --algorithms")
    terminal = shared.console()
    from fedbilevel.display.curves import can_draw, require_picture
    from fedbilevel.experiments import export
    from fedbilevel.experiments.compare import Look, comparison_table, draw, find_runs, load_groups
    from fedbilevel.experiments.names import is_task

    picture = Path(options.out or "comparison.png")
    require_picture(picture)
    if tasks := [what for what in options.what if not Path(what).exists() and is_task(what)]:
        raise ConfigurationError(f"{tasks[0]} is a task: name the algorithms to run on it with --algorithms")
    runs, left_out = find_runs(options.what)
    for line in left_out:
        shared.fail(shared.OK, f"left out, {line}")
    groups = load_groups(runs, Look(dict(options.label), options.columns, options.levels))
    drawn = can_draw()
    if drawn:
        draw(groups, picture, options.panel, options.size)
    written = export.write(groups, picture, _formats(options))
    terminal.print(comparison_table(groups, terminal.width))
    shared.say_paths(terminal, {"plot": [picture] * drawn, "also": written})
    return shared.OK


def _algorithms(options: argparse.Namespace) -> int:
    require(len(options.what) <= 1, "TASK", " ".join(options.what), "a single task with --algorithms")
    terminal = shared.console()
    shared.prepare_jax()
    from fedbilevel.display.curves import SUFFIXES, can_draw
    from fedbilevel.engines.tracking import Tracking, tracked_group
    from fedbilevel.experiments import export
    from fedbilevel.experiments.compare import Look, comparison_table, require_labelled
    from fedbilevel.experiments.search import Range
    from fedbilevel.experiments.series import PICTURE, comparison_folder, comparison_specs, play_all
    from fedbilevel.experiments.spec import said_of_several

    if options.out and Path(options.out).suffix.lower() in SUFFIXES:
        advice = f"to draw them, run fedbilevel compare FOLDER --out {options.out} afterwards"
        raise ConfigurationError(f"--out {options.out} must be the folder of the runs with --algorithms; {advice}")

    task = options.what[0] if options.what else None
    given = shared.settings(options)
    text, more = options.search_box, {"data": options.data, "centralised": options.centralised}
    box = None if text is None else Range.parse("--search-box", text, linear=True)
    more["search_box"] = box and (box.low, box.high)
    specs = comparison_specs(task, options.algorithms, settings=given, against=options.against or (), **more)
    look = Look(dict(options.label), options.columns, options.levels)
    require_labelled(look, specs)
    shared.tune(next(iter(specs.values())))
    folder = Path(options.out) if options.out else comparison_folder(specs)
    if not options.quiet:
        shared.say(terminal, said_of_several(list(specs.values())))
    failed, drawn, trackers = [], can_draw(), shared.trackers(options)

    def play(spec: Spec, place: Path, task: Task) -> None:
        try:
            played(spec, place, options.quiet, task=task, series=folder, trackers=trackers)
        except NumericalError as error:  # the other runs can be compared nevertheless
            failed.append(f"{place.relative_to(folder)}: {error}")
            shared.fail(shared.OK, failed[-1])

    first, tables = next(iter(specs.values())), export.names(folder / PICTURE)
    settings = dict(text.split("=", 1) for text in given)
    described = {"task": first.task.name, "algorithms": list(specs), "set": settings, "seeds": options.seeds}
    private = any(spec.privacy.terms is not None for spec in specs.values())
    files = [folder / PICTURE, *tables]
    group = tracked_group("comparison", {"comparison": described}, folder, files, tables, private)
    with Tracking(trackers, group) as tracking:
        groups = play_all(specs, folder, options.seeds, play, options.panel, options.size, drawn, look)
        written = export.write(groups, folder / PICTURE, _formats(options))
        tracking.outcome = {f"{one.metric}.{one.name}": statistics.fmean(one.values("final")) for one in groups}
    terminal.print(comparison_table(groups, terminal.width))
    shared.say_paths(terminal, {"runs": folder, "plot": [folder / PICTURE] * drawn, "also": written})
    return shared.NUMBERS_FAIL if failed or any(run.grown for group in groups for run in group.runs) else shared.OK


def _report(options: argparse.Namespace) -> int:
    """Write a web page about runs.

    The page is one HTML file with a picture, a table, specs and versions. It needs no network and runs no script.

      fedbilevel report runs/RUN                         one run: writes runs/RUN/report.html
      fedbilevel report runs/A runs/B                    runs side by side: writes report.html
      fedbilevel report runs/FOLDER                      all runs of a folder: writes runs/FOLDER/report.html

    The content of the folders is read and shown as text; nothing in it is executed.
    """
    from fedbilevel.experiments.export import write_page

    shared.say_paths(shared.console(), {"report": write_page(options.folders, options.out)})
    return shared.OK


def _add_sweep(add: shared.Add) -> None:
    sweep = add("sweep", _sweep)
    sweep.add_argument("base", nargs="?", metavar="TASK|SPEC.toml", help=f"{shared.TASK_HELP}; or a spec in TOML")
    shared.add_options(sweep, "algorithm", "data", set="a field of every run; repeatable")
    sweep.add_argument(
        "--grid", action="append", default=[], metavar="FIELD=VALUE,VALUE,…", help="the values of a field; repeatable"
    )
    sweep.add_argument(
        "--search", action="append", default=[], metavar="FIELD=LOW:HIGH[:log]", help="the range of a field; repeatable"
    )
    sweep.add_argument("--trials", type=shared.count, metavar="N", help="with --search: the number of points to draw")
    sweep.add_argument(
        "--pruner", choices=["halving", "hyperband", "median"], help="with --search: end the runs of bad points early"
    )
    sweep.add_argument("--storage", metavar="URL|FILE", help="with --search: the storage of the study (a file in DIR)")
    shared.add_options(sweep, "cohort", seeds="the seeds of every point (the spec's)")
    shared.add_length(sweep)
    sweep.add_argument("--select", metavar="METRIC", help="the metric or loss that decides (the task's first metric)")
    sweep.add_argument("--select-on-test", action="store_true", help="allow --select to be measured on test data")
    shared.add_options(
        sweep,
        "log",
        out="the folder of the sweep: new, or to continue it (runs/…)",
        quiet="print only the table and the paths",
    )


def _sweep(options: argparse.Namespace) -> int:
    """Make runs with different values of some fields, and choose the best values.

    A grid has every combination of the values of some fields, in the notation of --set. Each point is run with every
    seed, each run in its own folder. The best point has the best final mean of --select over the seeds.

      fedbilevel sweep quadratic --grid server_lr.x=0.01,0.03,0.1 --grid local_steps=1,5 --seeds 0,1,2 --out runs/steps
      fedbilevel sweep --set task.holdout=0.2 --select validation_accuracy --grid client_lr.x=0.01,0.1 --exchanges 300

    --search lets Optuna (extra [sweep]) draw --trials points from ranges: whole numbers if both ends are whole, else
    numbers with four significant digits. With --search, Optuna also chooses among the values of --grid.

      fedbilevel sweep quadratic --search server_lr.x=0.001:1:log --search local_steps=1:8 --trials 40 --out runs/search

    The same command with the same --out continues the sweep, and several processes that run it share the work. Hosts
    without a common disk share a search by --storage, the URL of a database (postgresql://…).

    The folder has the runs, sweep.csv with a line for each run, and the best spec, chosen.toml, for `fedbilevel run
    --spec`. `fedbilevel compare DIR` draws the runs.
    """
    terminal = shared.console()
    shared.prepare_jax()
    from fedbilevel.engines.tracking import Tracking, tracked_group
    from fedbilevel.experiments.folder import default_path
    from fedbilevel.experiments.sweep import CHOSEN, TABLE, sweep_table, write_files

    folder = options.out or default_path("sweep", Path(options.base or "").stem)
    trackers = shared.trackers(options)
    given = {"sweep": {name: getattr(options, name) for name in ("grid", "search", "trials", "seeds", "select")}}
    files = [folder / TABLE, folder / CHOSEN]
    group = tracked_group("sweep", given, folder, files, with_seed=files)
    try:
        with interrupts.unmixed(), Tracking(trackers, group) as tracking:
            found = _swept(options, folder, trackers)
            written = write_files(found, folder)
            tracking.outcome = found.outcome
    except KeyboardInterrupt:
        return shared.fail(interrupts.exit_code(), f"interrupted; continue with the same command and --out {folder}")
    terminal.print(sweep_table(found, terminal.width))
    shared.say_paths(terminal, {"runs": folder, **written})
    if found.best:
        return shared.OK
    fields = ", ".join(found.fields)
    return shared.fail(shared.NUMBERS_FAIL, f"every point failed: nothing is chosen; give other values of {fields}")


def _swept(options: argparse.Namespace, folder: Path, trackers: Sequence[Tracker]) -> Sweep:
    from fedbilevel.experiments.search import Range, search_specs
    from fedbilevel.experiments.sweep import parse_values, sweep_specs

    file = options.base if (options.base or "").endswith(".toml") else None
    base = shared.spec_tables(Path(file), None, options.algorithm) if file else None
    fields = _fields(options)
    grid = {name: parse_values(text) for name, (option, text) in fields.items() if option == "--grid"}
    space = {
        name: Range.parse(f"--search {name}", text) for name, (option, text) in fields.items() if option == "--search"
    }
    names = ("trials", "pruner", "storage")
    drawing = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given: dict[str, Any] = {name: getattr(options, name) for name in ("seeds", "select", "select_on_test")}
    say = (
        (lambda line: None) if options.quiet else partial(print, flush=True)
    )  # lines that rich prints itself would break the progress bar
    given |= {"say": say, "progress": False if options.quiet else None, "trackers": trackers}
    spec_of = _spec_of(options, base, fields)
    for name, value in drawing.items():
        require(bool(space), f"--{name}", value, "left out without --search")
    if not space:
        return sweep_specs(spec_of, grid, folder, **given)
    require("trials" in drawing, "--trials", None, "given with --search: it is the number of points to draw")
    return search_specs(spec_of, {**space, **grid}, folder, **given, **drawing)


def _fields(options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return the swept fields: field -> (the option that names the field, the text of the option)."""
    fields: dict[str, tuple[str, str]] = {}
    for option in ("--search", "--grid"):
        for given in getattr(options, option[2:]):
            name, _, text = (part.strip() for part in given.partition("="))
            require(bool(name and text), option, given, "of the form FIELD=VALUE,VALUE,…")
            if name in fields:
                raise ConfigurationError(f"{option} {name} is given twice: give all values in one option")
            fields[name] = option, text
    if not fields:
        raise ConfigurationError("a sweep needs a field and its values: --grid FIELD=VALUE,VALUE,…")
    return fields


def _bare(field: str) -> str:
    """Return the path of a field without its section, which may be omitted in an option."""
    return re.sub(r"^(run|task|algorithm)\.", "", field)


def _spec_of(options: argparse.Namespace, base: dict[str, Any] | None, fields: Collection[str]) -> SpecOf:
    """Return a function that makes the spec of a point, from the base spec, the options and the point's values."""
    from fedbilevel.experiments import configure
    from fedbilevel.experiments.runner import algorithm_of

    named = {"task": None if base else options.base, "algorithm": options.algorithm, "data": options.data}
    given = shared.settings(options)
    for setting in given:
        if _bare(setting.partition("=")[0].strip()) in map(_bare, fields):
            raise ConfigurationError(f"{setting} is given, but the field is swept: leave one of them out")

    def spec_of(point: PointValues) -> Spec:
        spec = configure(base, **named, settings=given, values=point)
        algorithm_of(spec)  # raises an error if the point's values are not allowed together
        shared.tune(spec)
        return spec

    return spec_of
