"""Define `fedbilevel check`, which checks a hypergradient, and `fedbilevel diagnose`, which suggests step sizes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.cli import shared
from fedbilevel.core.errors import ConfigurationError, refuse_together

if TYPE_CHECKING:
    from fedbilevel.experiments import Spec
    from fedbilevel.tasks import Task


def add_to(add: shared.Add) -> None:
    check = _added(add, "check", _check, "also check the estimate of this algorithm")
    check.add_argument(
        "--draws",
        type=shared.count,
        default=100,
        metavar="N",
        help="the number of rounds of each algorithm (%(default)s)",
    )
    look = _added(add, "diagnose", _diagnose, "suggest step sizes for this algorithm (simfbo)")
    replies = "instead, run N rounds and show the norms of replies and the effect of the noise of [privacy] on x and y"
    look.add_argument("--replies", type=shared.count, metavar="N", help=replies)
    look.add_argument("--all", action="store_true", help="also show all measurements, and steps for all methods")
    look.add_argument("--rounds", type=shared.count, metavar="N", help="the planned number of rounds (1000)")


def _added(add: shared.Add, name: str, function: Callable[[Any], int], which: str) -> argparse.ArgumentParser:
    command = add(name, function)
    command.add_argument("task", nargs="?", metavar="TASK", help=shared.TASK_HELP)
    shared.add_options(command, "data", "set", "spec", "cohort", seed="the seed of the task and of all draws (0)")
    of = f"{which}; {shared.OWN}; repeatable"
    command.add_argument("--algorithm", action="append", default=[], metavar="NAME", help=of)
    return command


def _check(options: argparse.Namespace) -> int:
    """Compare a task's hypergradient, computed in several ways.

    The reference is the hypergradient at the task's starting point by implicit differentiation over all samples in
    float64. It is compared with unrolling, finite differences, truncated series and conjugate gradient, and with the
    estimates of the algorithms of --algorithm in rounds with fresh samples and cohorts, with the settings of
    `fedbilevel run`.

    settings:
      --set task.clients=50             for the task
      --set fednest.inner.rounds=3      for an algorithm;  algorithm.… is for all of them
    """
    terminal = shared.console()
    shared.say_code(options.task, *options.algorithm)
    shared.prepare_jax()
    from fedbilevel.algorithms import ALGORITHMS
    from fedbilevel.core.algorithm import check_solves
    from fedbilevel.diagnostics.check import check_hypergradient
    from fedbilevel.engines.progress import showing
    from fedbilevel.experiments.loader import algorithm_class
    from fedbilevel.experiments.runner import algorithm_of
    from fedbilevel.experiments.spec import DEFAULT_TASK

    if unable := [name for name in options.algorithm if not algorithm_class(name).estimates_hypergradient()]:
        able = sorted(name for name, cls in ALGORITHMS.items() if cls.estimates_hypergradient())
        raise ConfigurationError(
            f"{unable[0]} makes no estimate of the hypergradient; these do: {', '.join(able)}. Single-loop methods "
            "make none outside their rounds; a method of your own makes one if it defines hypergradient_at. Without "
            f"--algorithm, `fedbilevel check {options.task or DEFAULT_TASK}` checks only the task's hypergradient"
        )
    specs, spec, task = _prepared(options, options.algorithm)
    estimators = {name: algorithm_of(specs[name]) for name in specs if options.algorithm}
    for algorithm in estimators.values():
        check_solves(algorithm, task.problem)
    with showing(None):
        report = check_hypergradient(
            task.problem,
            task.population,
            task.x0,
            task.y0,
            estimators=estimators,
            draws=options.draws,
            cohort=spec.run.cohort,
            key=spec.run.seed,
        )
    shared.say(terminal, report)
    return shared.OK


def _diagnose(options: argparse.Namespace) -> int:
    """Measure the curvature and other properties of a task, and suggest step sizes.

    The curvature of both losses and of the outer objective, and the differences between clients, are measured near the
    task's starting point. The first line of the output is a command that runs --algorithm with the step sizes that
    follow. Batch and cohort sizes are those of `fedbilevel run`.

    settings:
      --set task.clients=50             for the task
      --set batch_size=64               for the algorithms that have such a field
      --replies 10 --set privacy.clip=1 --set privacy.noise_multiplier=30 --set privacy.delta=1e-5
    """
    terminal = shared.console()
    shared.say_code(options.task, *options.algorithm)
    shared.prepare_jax()
    if options.replies:
        return _replies(options, terminal)
    from fedbilevel.diagnostics.diagnose import diagnose
    from fedbilevel.diagnostics.suggested import require_suggested
    from fedbilevel.engines.progress import showing
    from fedbilevel.experiments.loader import code_of, label

    ours = [name for name in options.algorithm if not code_of(name)]
    for name in ours:
        require_suggested(name)
    specs, spec, task = _prepared(options, options.algorithm)
    planned = {} if options.rounds is None else {"rounds": options.rounds}
    with showing(None):
        report = diagnose(task.problem, task.population, task.x0, task.y0, key=spec.run.seed, **planned)
    commands = []
    for name, one in specs.items():
        if code_of(one.algorithm.name):
            known = f"no step sizes are suggested for {label(one.algorithm.name)}, your own algorithm"
            commands.append(f"{known}; the safe steps below are upper bounds for its steps on x, y and v")
            continue
        batch_size = one.algorithm.fields.get("batch_size")
        fields = report.fields(name, batch_size=batch_size, cohort=one.run.cohort)
        commands.append(_command(options, name, fields))
    details = ["", report.details] if options.all else []
    shared.say(terminal, *commands, "", *report.why(ours if options.algorithm else list(specs)), *details)
    return shared.OK


def _replies(options: argparse.Namespace, terminal: Any) -> int:
    """Run some rounds of each algorithm, and show the norms of the clients' replies."""
    from fedbilevel.diagnostics.replies import reply_norms
    from fedbilevel.experiments.experiment import cohort_of
    from fedbilevel.experiments.runner import build

    other = {"--all": options.all, "--rounds": options.rounds}
    if unused := [name for name, value in other.items() if value]:
        raise ConfigurationError(f"{unused[0]} cannot be given with --replies, which measures only replies")
    specs, _, task = _prepared(options, options.algorithm)
    for name, spec in specs.items():
        made, parts = build(spec, task), (task.problem, task.population, task.x0, task.y0)
        given: dict[str, Any] = {"cohort": cohort_of(spec.run), "key": spec.run.seed, "privacy": made.privacy}
        found = reply_norms(made.algorithm, *parts, rounds=options.replies, **given)
        shared.say(terminal, f"{name}, {options.replies} rounds; L2 norms of replies", "", found, "")
    return shared.OK


def _prepared(options: argparse.Namespace, algorithms: Sequence[str]) -> tuple[dict[str, Spec], Spec, Task]:
    """Return the specs of the algorithms by name, the first spec, and its task.

    Without names, the algorithm is that of --spec, or the default.
    """
    from fedbilevel.core.tables import Wrong
    from fedbilevel.experiments.runner import task_of
    from fedbilevel.experiments.series import comparison_specs, seeded
    from fedbilevel.experiments.spec import DEFAULT_ALGORITHM, sections

    given = [*options.set, *([f"run.cohort={options.cohort}"] if options.cohort else [])]
    tables = shared.spec_tables(Path(options.spec), options.task, *algorithms[:1]) if options.spec else {}
    base = sections(tables, wrong := Wrong())
    refuse_together(wrong)
    task, own = options.task or base["task"].get("name"), base["algorithm"].get("name", DEFAULT_ALGORITHM)
    specs = comparison_specs(task, algorithms or [own], settings=given, data=options.data, base=base)
    if options.seed is not None:
        specs = {name: seeded(spec, options.seed) for name, spec in specs.items()}
    first = next(iter(specs.values()))
    shared.tune(first)
    return specs, first, task_of(first)


def _command(options: argparse.Namespace, algorithm: str, fields: Mapping[str, Any]) -> str:
    """Return the command that runs the task by an algorithm with these fields."""
    from fedbilevel.algorithms import ALGORITHMS
    from fedbilevel.core.card import WIDTH
    from fedbilevel.experiments import toml
    from fedbilevel.experiments.names import spelled

    words = ["fedbilevel", "run", *([options.task] if options.task else []), "--algorithm", algorithm]
    for name in ("spec", "data", "seed", "cohort", "rounds"):
        if getattr(options, name, None) is not None:
            words += [f"--{name}", str(getattr(options, name))]
    given = [setting for setting in options.set if spelled("algorithm", setting.partition(".")[0]) not in ALGORITHMS]
    values = {name: toml.value(_rounded(value)).strip('"') for name, value in fields.items()}
    found = [f"algorithm.{name}={value}" for name, value in values.items()]
    lines = [shlex.join(words)]
    for one in (f"--set {shlex.quote(one)}" for one in [*given, *found]):
        if len(lines[-1]) + len(one) < WIDTH:
            lines[-1] += f" {one}"
        else:
            lines.append(f"    {one}")
    return " \\\n".join(lines)


def _rounded(value: Any) -> Any:
    """Return a value in the form of a spec, with floating-point numbers rounded to three significant digits.

    A part becomes a table with its name and with the fields that differ from their defaults.
    """
    from fedbilevel.core.algorithm import Part
    from fedbilevel.core.hyperparameters import own_values

    if isinstance(value, Part):
        value = {"name": value.kind, **own_values(value)}
    elif isinstance(value, tuple):
        value = value._asdict()  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value
