"""`fedbilevel flower`: write a Flower app, make keys for a trial, see a whole federation run on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbilevel.cli import shared
from fedbilevel.core.errors import ConfigurationError


def add_to(add: shared.Add) -> None:
    flower = add("flower", _help)
    commands = flower.add_subparsers(title="commands", metavar="COMMAND")
    inside = shared.Add(commands)
    new = inside("new", _new)
    new.add_argument("folder", type=Path, metavar="DIR", help="where to: new or empty")
    for command in (new, demo := inside("demo", _demo)):
        command.add_argument("--task", metavar="TASK", help=shared.TASK_HELP)
        shared.add_options(command, "spec", "algorithm", "rounds", set="see `fedbilevel run -h`; repeatable")
        command.add_argument("--clients", type=shared.count, metavar="N", help="how many clients (demo: 4)")
    keys = inside("keys", _keys)
    keys.add_argument("folder", type=Path, metavar="DIR", help="where to: nothing is overwritten")
    keys.add_argument("--clients", type=shared.count, metavar="N", required=True, help="how many clients")
    keys.add_argument("--host", action="append", metavar="NAME", help="how the server is reached: name or address")
    asked = inside("status", _status)
    asked.add_argument("folder", type=Path, metavar="RUN", help="the server's run folder")
    new.add_argument("--data", metavar="NAME", help="the task's data set (digits)")
    demo.add_argument("--out", type=Path, metavar="DIR", help="for app, run, keys and logs: new or empty (runs/…)")
    demo.add_argument("--stock", action="store_true", help="Flower's own clients, one process per message: slow")


def _help(options: argparse.Namespace) -> int:
    """Run in a real federation, over Flower."""
    text = "fedbilevel flower needs a command: new, keys, status or demo (see fedbilevel flower --help)"
    raise ConfigurationError(text)


def _new(options: argparse.Namespace) -> int:
    """Write a Flower app for a task."""
    from fedbilevel.experiments.federation import write_app

    clients = [] if options.clients is None else [f"task.clients={options.clients}"]
    write_app(shared.configured(options, *clients), options.folder)
    print(f"app   {options.folder}\nnext  see {options.folder / 'README.md'}")
    return shared.OK


def _keys(options: argparse.Namespace) -> int:
    """Make certificates and keys for a trial."""
    from fedbilevel.flower.launch import credentials

    names = options.host or ["localhost", "127.0.0.1"]
    made = credentials.make(options.folder, options.clients, names)
    print(f"server   {made.certificate}, {made.key}\nclients  {made.ca} for all; {made.clients[0]}, … for one each")
    return shared.OK


def _status(options: argparse.Namespace) -> int:
    """Say how far a federated run is, and who is absent and why."""
    from fedbilevel.experiments.federation import status
    from fedbilevel.experiments.folder import Folder

    print(*status(Folder(options.folder)), sep="\n")
    return shared.OK


def _demo(options: argparse.Namespace) -> int:
    """Run a federation of processes on this machine.

    Starts a SuperLink and one SuperNode per client as processes of this machine, with TLS and a key for every client,
    plays a task (a network on handwritten digits that are divided over the clients), and stops everything it started.
    """
    from fedbilevel.experiments import configure
    from fedbilevel.experiments.federation import play_demo, seen_by

    given = [] if options.spec else ["run.cohort=none", "run.rounds=50", "run.eval_every=5"]
    named = {"task": options.task, "algorithm": options.algorithm}
    if options.clients or (not options.spec and "clients" in configure(**named).task.fields):
        given.append(f"task.clients={options.clients or 4}")
    spec = shared.configured(options, *given)
    play_demo(spec, len(seen_by(spec, "server").clients), options.out, persistent=not options.stock)
    return shared.OK
