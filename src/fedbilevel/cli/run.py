"""Define `fedbilevel run`, which starts runs or continues one, and `fedbilevel flower`, the commands for federations.

The function `played` runs a spec for all commands that make runs.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedbilevel.experiments as experiments  # this loads nothing yet; "from fedbilevel import" would load everything
from fedbilevel.cli import shared
from fedbilevel.cli.study_options import add_study_options, given_options, study_table
from fedbilevel.core import interrupts
from fedbilevel.core.errors import CheckpointError, ConfigurationError, NumericalError, require

if TYPE_CHECKING:
    from fedbilevel.experiments import Folder, Spec
    from fedbilevel.experiments.folder import LoadedRun
    from fedbilevel.tasks import Task
    from fedbilevel.trackers import Tracker


def add_to(add: shared.Add) -> None:
    run = add("run", _run)
    run.add_argument("task", nargs="?", metavar="TASK", help=shared.TASK_HELP)
    shared.add_options(run, "algorithm", "data", "set", "spec", "cohort")
    shared.add_length(run)
    shared.add_options(
        run.add_mutually_exclusive_group(),
        seed="the seed of the run, its task and its clock (0)",
        seeds="one run for each seed, in subfolders seed-N; with the --out of an earlier command, the missing ones",
    )
    run.add_argument("--eval-every", type=shared.count, metavar="N", help="the number of rounds between evaluations")
    place = run.add_mutually_exclusive_group()
    shared.add_options(place, out="the run folder: new or empty (runs/…)")
    place.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue this run; allows --rounds, --force, --log, --quiet"
    )
    run.add_argument("--force", action="store_true", help="with --resume: continue even if the task has changed")
    shared.add_options(run, "log", quiet="print only the run's folder")
    run.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="share the run with other processes: the address of process 0, or auto",
    )
    run.add_argument("--processes", type=shared.count, metavar="N", help="with --coordinator: the number of processes")
    run.add_argument(
        "--process", type=shared.seed, metavar="K", help="with --coordinator: the number of this process, from 0"
    )
    _add_flower(add)


def _run(options: argparse.Namespace) -> int:
    """Run an algorithm on a task.

    fields for --set:
      Dotted names: algorithm.local_steps=10, task.clients=50, algorithm.server_lr.x=0.05, run.rounds=300,
      engine.chunk=4, clock.spread=0.3. A name without a section means the algorithm's field of that name, or else the
      only field of that name. Values are TOML; a bare word is text, and none is no value. `fedbilevel tasks` and
      `fedbilevel algorithms` list all tasks and algorithms.
        client_lr='{x = {schedule = "cosine_decay_schedule", init_value = 0.1, decay_steps = 500}, y = 0.1, v = 0.1}'
        schedules and server optimizers have the names and arguments of Optax
        local_optimizer=momentum local_optimizer.decay=0.9    a part: its name selects the part with its defaults, and
                                                              its fields, which may be parts too, follow after a dot
        hypergradient.solver=cg hypergradient.solver.max_steps=10
        server_optimizer='{name = "adam", b1 = 0.9}'
        clients.local_steps='{low = 1, high = 10}'            numbers that differ between clients: drawn per client and
        clients.outer_steps='[1, 5, 2]'                       round, or listed; for fields that allow it
        clients.capacity='[1, 0.5, 0.25]'                     the share of the model that each client can hold
        run.exchanges=500                                     a budget of messages, in place of run.rounds
        run.bytes=2e9 run.evaluations=1e6 run.time=200        a budget of traffic, of work, or of virtual seconds
        clock.network=1.0 clock.compute=0.1                   seconds for a message, and for a gradient or product
        clock.stragglers=5 clock.slowdown=5.0                 5 clients are 5 times slower than the others
        compression=top_k layers.compression.share=0.2        clients send a fifth of the entries of each reply
        rule=median                                           a robust rule in place of the mean of replies
        run.pooled=true                                       one client that holds every sample
        privacy.clip=1 privacy.noise_multiplier=30 privacy.delta=1e-5 privacy.budget=4
                                                              differential privacy of each client's replies

    several processes, on one or more hosts:
      Run the same command in each, except for --process 0, 1, …, N-1. Process 0 listens at HOST:PORT, writes the run
      folder and prints; its spec and its --resume apply to all. A run may be resumed with any number of processes.
      --coordinator auto takes all three options from a launcher's environment (Slurm, Open MPI, Kubernetes).

    your own task or algorithm:
      TASK may be module:NAME or path/to/file.py:NAME, where NAME is a fedbilevel.tasks.Task or a function that returns
      a task; the function's keyword arguments are then the fields of [task]. --algorithm takes the same forms, where
      NAME is a subclass of fedbilevel.authoring.Algorithm. --spec and --resume run the code that a spec names, and
      first print where it is. So read the spec.toml of a stranger before you run it. `fedbilevel compare RUN …` only
      reads runs and executes nothing in them.

    exit codes: 0 done, 2 wrong input, 3 the numbers are not finite (NaN, …) or diverge, 4 a file could not be written,
      5 too few clients replied or another process was lost, 6 the budget of privacy ended the run, 130 Ctrl-C,
      143 SIGTERM
    """
    together = [getattr(options, name) is not None for name in ("coordinator", "processes", "process")]
    return _run_together(options) if any(together) else _play(options)


def _run_together(options: argparse.Namespace) -> int:
    """Run this process's part of a run that several processes share.

    After an error, this process ends without waiting for the other processes.
    """
    number = (options.processes is not None, options.process is not None)
    if options.coordinator is None or not (all(number) or options.coordinator == "auto"):
        raise ConfigurationError("--coordinator, --processes and --process must be given together")
    require(not options.seeds, "--seeds", options.seeds, "left out with --coordinator, which makes one run")
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "4"
    )  # hides the messages of JAX's runtime when it ends a process; the reason is printed here
    shared.prepare_jax()
    from fedbilevel.engines.multihost import join
    from fedbilevel.engines.process_group import current_group

    try:
        join(options.coordinator, options.processes, options.process)
        current_group().require_same({"--resume": "left out" if options.resume is None else "given"})
        return _play(options)
    except BaseException as error:
        if current_group().store is None:
            raise  # no other process is waiting
        why = type(error).__name__ if isinstance(error, SystemExit) else shared.sentence(error)
        current_group().part(_reported(error, options.debug), why)


def _reported(error: BaseException, debug: bool) -> int:
    """Print the message of an error, and return the exit code."""
    if isinstance(error, SystemExit):
        return int(error.code or shared.OK)  # its message has been printed
    code = shared.exit_code(error)
    if code is None or debug:
        traceback.print_exception(error)
    return 1 if code is None else shared.fail(code, shared.sentence(error))


def _play(options: argparse.Namespace) -> int:
    if options.force and options.resume is None:
        raise ConfigurationError("--force is only allowed with --resume")
    if options.resume is not None:
        return _resume(options)
    spec, folder = _chosen(options)
    if options.seeds:
        return _run_seeds(options, spec, folder)
    ended = played(
        spec, folder, options.quiet, partial(experiments.run, spec, folder), trackers=shared.trackers(options)
    )
    return _code(ended)


def _code(*ended: LoadedRun | None) -> int:
    """Return the exit code after runs that have ended."""
    if any(one and one.grown for one in ended):
        return shared.NUMBERS_FAIL
    return shared.BUDGET_SPENT if any(one and one.out_of_budget for one in ended) else shared.OK


def _chosen(options: argparse.Namespace) -> tuple[Spec, Path]:
    """Return the spec and the folder of the run. If several processes share the run, process 0 decides both."""
    if options.coordinator is None:
        return _described(options)
    from fedbilevel.engines.process_group import current_group

    def described() -> tuple[dict[str, dict[str, Any]], str]:
        spec, folder = _described(options)
        return spec.tables(), str(folder)

    tables, folder = current_group().decide(described)
    spec = experiments.resolve(tables)
    shared.tune(spec)
    return spec, Path(folder)


def _described(options: argparse.Namespace) -> tuple[Spec, Path]:
    """Return the spec and the folder that the options describe."""
    if options.out is not None and not options.seeds:
        experiments.Folder(options.out).require_free()
    spec = shared.configured(options)
    spec = spec if options.seed is None else experiments.seeded(spec, options.seed)
    return spec, options.out or experiments.Folder.new(spec).path


WITH_RESUME = ["command", "debug", "resume", "rounds", "force", "log", "quiet", "coordinator", "processes", "process"]
"""The options that are allowed with `--resume`, and other names in the parser's result."""


def _resume(options: argparse.Namespace) -> int:
    if given := [name for name, value in vars(options).items() if name not in WITH_RESUME and value not in (None, [])]:
        raise ConfigurationError(f"--resume uses the spec of its run; {', '.join(given)} cannot be given with it")
    shared.prepare_jax()
    from fedbilevel.experiments.runner import resumable

    place = experiments.Folder(options.resume)
    if place.spec.is_file():  # only process 0 may have the folder
        shared.spec_tables(place.spec)  # prints which code the spec runs
    spec = resumable(place, options.rounds)
    shared.tune(spec)
    play = partial(experiments.resume, place.path, rounds=options.rounds, force=options.force)
    return _code(played(spec, place.path, options.quiet, play, trackers=shared.trackers(options)))


def _run_seeds(options: argparse.Namespace, spec: Spec, folder: Path) -> int:
    """Make the runs of all seeds that have not finished in the folder yet, and draw one picture of all runs."""
    from fedbilevel.display.curves import can_draw
    from fedbilevel.engines.tracking import MEMORY, Tracking, tracked_group
    from fedbilevel.experiments import tables
    from fedbilevel.experiments.compare import draw, load_groups
    from fedbilevel.experiments.series import require_series

    drawn = can_draw()
    series = {folder / f"seed-{seed}": experiments.seeded(spec, seed) for seed in options.seeds}
    picture = experiments.Folder(folder).plot
    require_series(folder, series, besides=[picture.name, MEMORY, f".{MEMORY}.lock"])
    trackers = shared.trackers(options)
    with Tracking(trackers, tracked_group("seeds", {"seeds": options.seeds}, folder, [picture])):
        runs = [played(one, path, options.quiet, series=folder, trackers=trackers) for path, one in series.items()]
        if drawn:
            draw(load_groups(list(series)), picture)
    terminal = shared.console(options.quiet)
    terminal.print(tables.seeds_table([one.summary for one in runs if one], terminal.width))
    shared.say_paths(terminal, {"runs": folder, "plot": [picture] * drawn})
    return _code(*runs)


def played(
    spec: Spec,
    folder: Path,
    quiet: bool,
    play: Callable[..., object] | None = None,
    *,
    task: Task | None = None,
    series: Path | None = None,
    trackers: Sequence[Tracker] = (),
) -> LoadedRun | None:
    """Run a spec, show its progress and its outcome, and print how to continue if the run does not reach its end.

    If several processes share the run, only process 0 shows the run; the others return None.

    Args:
        spec: the spec.
        folder: the folder of the run.
        quiet: whether to print only the folder.
        play: the function that runs the spec, such as `experiments.run` or `resume`; None: `complete`, which leaves a
            finished run as it is.
        task: the spec's task, if the caller has already made it.
        series: the folder of several runs, if a command makes these and shows them in one picture.
        trackers: trackers that record the run.
    """
    from fedbilevel.display import Watch
    from fedbilevel.display.curves import can_draw
    from fedbilevel.engines.process_group import current_group
    from fedbilevel.engines.progress import showing
    from fedbilevel.experiments import tables
    from fedbilevel.experiments.runner import first_metric

    group, place = current_group(), experiments.Folder(folder)
    if play is None and place.finished:
        return experiments.load_run(folder)
    experiment = experiments.build(spec, task)  # this shows the progress of downloads
    play = play or partial(experiments.complete, spec, folder)
    quiet = quiet or not group.is_first
    terminal = shared.console(quiet)
    brief = series is not None and not terminal.is_terminal
    group.saved.advice = go_on = CONTINUE.format(folder)
    drawn = series is None and group.decide(can_draw)
    watch = Watch(shared.console(quiet or brief), first_metric(experiment.task), spec.run.budget, spec.timed)
    try:
        with interrupts.unmixed(), showing(watch) as display:
            play(experiment=experiment, callbacks=[*trackers, watch], progress=display, plot=drawn)
    except KeyboardInterrupt:
        raise SystemExit(shared.fail(interrupts.exit_code(), _how_to_resume(place, series, group.is_first))) from None
    except NumericalError as error:
        stays = f"the last good checkpoint is kept in {folder}" if place.begun else "no checkpoint had been written"
        error.append(stays if group.is_first else ELSEWHERE)
        raise
    except CheckpointError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and place.begun:
            error.append(f"free some space, then {go_on}")
        raise
    if not group.is_first:
        return None
    ended = experiments.load_run(folder)
    if series is None:
        terminal.print(tables.summary_table(ended.summary))
        shared.say_paths(terminal, {"run": folder, "plot": [place.plot] * drawn})
    else:
        shared.say(terminal, tables.summary_line(folder.relative_to(series), ended.summary))
    if quiet:
        print(folder)
    return ended


CONTINUE = "continue with: fedbilevel run --resume {}"
ELSEWHERE = "any checkpoint is with process 0"


def _how_to_resume(place: Folder, series: Path | None, first: bool) -> str:
    if not first:
        return f"interrupted; {ELSEWHERE}"
    if series is not None:
        return f"interrupted; continue with the same command and --out {series}"
    if place.begun:
        return f"interrupted; {CONTINUE.format(place.path)}"
    return "interrupted before the first checkpoint; there is nothing to resume"


def _add_flower(add: shared.Add) -> None:
    commands = add("flower", _help).add_subparsers(title="commands", metavar="COMMAND")
    inside = shared.Add(commands)
    new = inside("new", _new)
    new.add_argument("folder", type=Path, metavar="DIR", help="the folder of the app: new or empty")
    for command in (new, demo := inside("demo", _demo)):
        command.add_argument("--task", metavar="TASK", help=shared.TASK_HELP)
        shared.add_options(command, "spec", "algorithm", "rounds", set="see `fedbilevel run -h`; repeatable")
        command.add_argument("--clients", type=shared.count, metavar="N", help="the number of clients (demo: 4)")
    keys = inside("keys", _keys)
    keys.add_argument("folder", type=Path, metavar="DIR", help="the folder of the keys; nothing is overwritten")
    keys.add_argument("--clients", type=shared.count, metavar="N", required=True, help="the number of clients")
    keys.add_argument(
        "--host", action="append", metavar="NAME", help="a name or address at which the server is reached"
    )
    looked = inside("check", _check)
    looked.add_argument("app", type=Path, metavar="APP", help="the app's folder, or a spec")
    looked.add_argument(
        "--node-config", metavar='"NAME=VALUE …"', required=True, help="the node configuration of the SuperNode"
    )
    looked.add_argument("--superlink", metavar="HOST:PORT", help="check that this SuperLink answers the site")
    trust = looked.add_mutually_exclusive_group()
    trust.add_argument(
        "--root-certificates", type=Path, metavar="FILE", help="the certificate of the SuperLink's authority"
    )
    trust.add_argument("--insecure", action="store_true", help="the SuperLink has no TLS")
    looked.add_argument("--auth-supernode-private-key", type=Path, metavar="FILE", help="the site's key")
    checked = inside("audit", _audit)
    checked.add_argument("folder", type=Path, metavar="FOLDER", help="the site's state-folder")
    checked.add_argument(
        "--holds", default="", metavar="HASH", help="check that the line with this hash is still there"
    )
    approved = inside("approve", _approve)
    approved.add_argument("folder", type=Path, metavar="FOLDER", help="the site's state-folder")
    approved.add_argument("hash", metavar="HASH", help="the hash that `flower check` and the site's refusal show")
    approved.add_argument(
        "--by", required=True, metavar="NAME", help="the person who has read the text and approves it"
    )
    approved.add_argument(
        "--withdraw", action="store_true", help="withdraw an approval, so that the site refuses from now on"
    )
    shown = inside("status", _status)
    shown.add_argument("--json", action="store_true", help="with RUN: print JSON for programs")
    shown.add_argument(
        "--prometheus", type=Path, metavar="FILE", help="with RUN: write metrics to this file, FILE.prom"
    )
    asked = shown.add_mutually_exclusive_group(required=True)
    asked.add_argument("folder", nargs="?", type=Path, metavar="RUN", help="the server's run folder")
    asked.add_argument(
        "--connection", metavar="NAME", help="check that this SuperLink of Flower's config.toml begins runs"
    )
    new.add_argument("--data", metavar="NAME", help="the task's data set (digits)")
    add_study_options(new)
    demo.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder for app, run, keys and logs: new or empty (runs/…)"
    )
    shared.add_options(demo, "log")
    demo.add_argument(
        "--stock", action="store_true", help="use Flower's own clients, which start a process per message: slow"
    )


def _help(options: argparse.Namespace) -> int:
    """Run a federation over Flower."""
    commands = "new, keys, check, approve, audit, status or demo"
    raise ConfigurationError(f"fedbilevel flower needs a command: {commands} (see fedbilevel flower --help)")


def _new(options: argparse.Namespace) -> int:
    """Write a Flower app for a task, or for a study of several sites' tables."""
    from fedbilevel.experiments.federation import write_app

    if options.estimator is not None:
        return _new_study(options)
    given = given_options(options)
    require(not given, ", ".join(given), "given", "left out without --estimator")

    clients = [] if options.clients is None else [f"task.clients={options.clients}"]
    shared.say_code(options.task, options.algorithm)
    write_app(shared.configured(options, *clients), options.folder)
    print(f"app   {options.folder}\nnext  see {options.folder / 'README.md'}")
    return shared.OK


def _new_study(options: argparse.Namespace) -> int:
    from fedbilevel.estimators import Study
    from fedbilevel.experiments.study import write_app

    others = [name for name in ("task", "spec", "algorithm", "set", "clients", "data") if getattr(options, name)]
    require(not others, "--estimator", f"with --{' --'.join(others)}", "without them: a study has no task")
    write_app(Study.read(study_table(options)), options.folder)
    print(f"app   {options.folder}\nnext  see {options.folder / 'README.md'}")
    return shared.OK


def _keys(options: argparse.Namespace) -> int:
    """Make certificates and keys for a trial."""
    from fedbilevel.flower.launch import credentials

    names = options.host or ["localhost", "127.0.0.1"]
    made = credentials.make(options.folder, options.clients, names)
    print(f"server   {made.certificate}, {made.key}\nclients  {made.ca} for all; {made.clients[0]}, … for each client")
    return shared.OK


def _check(options: argparse.Namespace) -> int:
    """Check a site before it is started: configuration, data, privacy, floors, and the connection to the SuperLink.

    Only Flower's own greeting is sent, signed with the key. Like the site itself, this command runs the app's code,
    which reads the data.
    """
    from fedbilevel.experiments import read_spec, read_study, study
    from fedbilevel.experiments.federation import check

    named = (options.insecure, options.root_certificates is not None)
    require(options.superlink is None or any(named), "--superlink", "alone", "with --root-certificates or --insecure")
    given = options.superlink, options.root_certificates, options.auth_supernode_private_key
    inside = [file for name in ("spec", "study") for file in options.app.glob(f"*/{name}.toml")]
    found = [options.app] if options.app.is_file() else inside
    if not options.app.exists():
        raise ConfigurationError(f"there is no file or folder {str(options.app)!r}")
    allowed = "a spec.toml or study.toml, or the folder of an app whose package has exactly one of these files"
    require(len(found) == 1, "APP", str(options.app), allowed)
    terminal = shared.console()
    if options.app.is_dir():
        sys.path.insert(0, str(options.app))
    shared.prepare_jax()
    if found[0].name == study.FILE:
        lines = study.check(read_study(found[0]), options.node_config, *given)
    else:
        shared.spec_tables(found[0])  # prints which code the spec runs
        lines = check(read_spec(found[0]), options.node_config, *given)
    for name, said in lines:
        shared.say(terminal, f"{name:10} {said}")
    return shared.OK


def _approve(options: argparse.Namespace) -> int:
    """Approve a run by the hash of its text, so that the site takes part in it.

    Only a site with approve="ask" in its node configuration waits for an approval. The text that a site was asked to
    approve is asked-HASH.txt in the folder. The site's audit records who approved what, and when.
    """
    from fedbilevel.flower.versions import require_flower

    require_flower()
    from fedbilevel.flower.client.approval import Approvals

    approvals = Approvals(options.folder)
    approvals.change(options.hash, options.by, approve=not options.withdraw)
    text = approvals.text_of(options.hash)
    where = f": {text}" if text.exists() else "; the site has not been asked for it yet"
    said = "no longer approved" if options.withdraw else "approved"
    shared.say(shared.console(), f"{said}: {options.hash}{where}")
    return shared.OK


def _audit(options: argparse.Namespace) -> int:
    """Verify the chain of a site's audit, and report the first broken line.

    A line that was cut when its process was killed is reported, but does not break the chain. The chain is also whole
    if lines were removed at its end. To find that, note the hash of a line, and give it later with --holds.
    """
    from fedbilevel.flower.versions import require_flower

    require_flower()
    from fedbilevel.flower.client.audit import Audit
    from fedbilevel.flower.client.store import requests_in

    audit = Audit(options.folder)
    report = audit.verify(options.holds)
    if report.broken:
        raise ConfigurationError(report.broken, where=str(audit.path))
    require(not options.holds or report.found, "--holds", options.holds, f"the hash of a line of {audit.path}")
    said = [f"{report.count} lines in an unbroken chain, from {report.first} to {report.latest}"]
    said += [f"line {number} was cut: its process was killed" for number in report.cut]
    for client, counted in requests_in(options.folder).items():
        if counted > (last := report.requests.get(client, 0)):
            why = "lines are missing at the end, or its process was killed before it wrote them"
            said.append(
                f"client {client}: {counted} requests were counted, but the last line is for request {last}: {why}"
            )
    shared.say(shared.console(), *said, f"last hash {report.last}")
    return shared.OK


def _status(options: argparse.Namespace) -> int:
    """Show the progress of a federated run and its absent clients, or check that a SuperLink begins runs.

    The exit codes are the same as those of `fedbilevel run`. The exit code 5 also means that the SuperLink does not
    begin a submitted run. With --prometheus, a file for the textfile collector of node_exporter is written atomically,
    and the exit code is then 0.
    """
    from fedbilevel.core.writing import write_text
    from fedbilevel.experiments.federation_status import Status
    from fedbilevel.experiments.folder import Folder
    from fedbilevel.flower.launch.processes import Console, require_begun
    from fedbilevel.flower.launch.supernode import environment

    if options.connection is not None:
        of_run = [f"--{name}" for name in ("json", "prometheus") if getattr(options, name)]
        require(not of_run, "--connection", f"with {', '.join(of_run)}", "given without them: they need a run folder")
        require_begun(Console(environment(os.environ), Path.cwd()), options.connection)
        print(f"{options.connection} has begun all runs that were submitted")
        return shared.OK
    status = Status.of(Folder(options.folder))
    if options.prometheus is not None:
        write_text(options.prometheus, status.prometheus(options.folder.resolve().name))
        return shared.OK
    shared.say(shared.console(), *([json.dumps(status.table, indent=2)] if options.json else status.lines))
    return shared.OK if status.ended is None else shared.fail(shared.exit_code(status.ended) or 1, str(status.ended))


def _demo(options: argparse.Namespace) -> int:
    """Run a federation of processes on this machine.

    The command starts a SuperLink and one SuperNode per client as processes of this machine, with TLS and a key for
    every client, runs a task (by default a network on handwritten digits, divided between the clients), and stops
    everything.
    """
    from fedbilevel.experiments import configure
    from fedbilevel.experiments.federation import play_demo, seen_by

    given = [] if options.spec else ["run.cohort=none", "run.rounds=50", "run.eval_every=5"]
    named = {"task": options.task, "algorithm": options.algorithm}
    if options.clients or (not options.spec and "clients" in configure(**named).task.fields):
        given.append(f"task.clients={options.clients or 4}")
    spec = shared.configured(options, *given)
    shared.trackers(options)  # the server makes its own trackers; this reports a missing library before anything starts
    clients = len(seen_by(spec, "server").clients)
    play_demo(spec, clients, options.out, persistent=not options.stock, log=options.log)
    return shared.OK
