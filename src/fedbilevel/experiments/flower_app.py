"""A Flower app for a spec: the few files that `flwr run` wants."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from fedbilevel import __version__
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.experiments.federation import require_real
from fedbilevel.experiments.own_task import own_file, task_maker
from fedbilevel.experiments.places import write_text
from fedbilevel.experiments.spec import Named, Spec

APP = '''\
"""The {party} of a federation: see spec.toml."""

from pathlib import Path

from fedbilevel.experiments import federation, read_spec

app = federation.{function}(read_spec(Path(__file__).with_name("spec.toml")))
'''

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{title}"
license = "Apache-2.0"
# fedbilevel {version} is installed beforehand, from a clone of its repository: pip install ".[cli,flower]". It is on no
# package index; named here, it would be fetched from one, where anybody may register the name.
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedbilevel"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# flwr run . CONNECTION --run-config 'settings="run.rounds=50 algorithm.local_steps=3" quorum=0.8'
[tool.flwr.app.config]
settings = ""     # FIELD=VALUE, with spaces between: changes spec.toml for this run, as --set of fedbilevel run
out = ""          # the server's run folder; an unfinished run in it is continued. Empty: runs/… where the server runs
client-keys = ""  # a folder of the server's: client-0.pub, …: who registered with that key is client 0. Empty: anybody
quorum = 0.5      # share of a cohort that must answer
deadline = 120.0  # seconds that a client has for an answer
attempts = 3      # how often those who did not answer are asked, before the run stops
join = 60.0       # seconds to wait for clients that are not online
poll = 0.5        # seconds between two looks for answers, at most
norm-factor = 1e4  # how many times as long as usual an update may be; 0: any
message-factor = 10.0  # how many times as long as the message it may be, though norm-factor would refuse it
norm-bound = 0.0  # largest norm of an update that counts; 0: any
"""

README = """\
# {name}

{title}, as a Flower app. `{package}/spec.toml` says what is computed; both sides read it.

Simulated, on one machine, in two terminals:

    flower-superlink --insecure --simulation --host 127.0.0.1 --port 8000 --disable-runtime-dependency-installation
    flwr run . simulation --federation-config 'num-supernodes={clients} client-resources-num-cpus=1' --stream

with this in `~/.flwr/config.toml`:

    [superlink.simulation]
    address = "127.0.0.1:8000"
    insecure = true

For real, with TLS and a key for every client: docs/federation.md of fedbilevel.
"""


def write_app(spec: Spec, folder: Path) -> None:
    """Write the app to a new folder.

    Raises:
        ConfigurationError: there is something in the folder, or its name is none for a Python package; or the spec is
            one of a simulation.
    """
    require_real(spec)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"cannot write an app to {folder}: it exists and is not empty")
    package = re.sub(r"[^a-z0-9_]", "_", folder.resolve().name.lower())
    require(package.isidentifier(), "DIR", str(folder), "a name that begins with a letter, for a Python package")
    inside = folder / package
    inside.mkdir(parents=True)
    if (file := own_file(spec.task.name)) is not None:
        spec = _with_file(spec, file, inside)
    names = {"package": package, "name": package.replace("_", "-"), "title": spec.title, "version": __version__}
    write_text(inside / "__init__.py", "")
    write_text(inside / "spec.toml", spec.to_toml())
    write_text(inside / "server_app.py", APP.format(party="server", function="server_app"))
    write_text(inside / "client_app.py", APP.format(party="clients", function="client_app"))
    write_text(folder / "pyproject.toml", PROJECT.format(**names))
    write_text(folder / "README.md", README.format(**names, clients=spec.task.fields.get("clients", "N")))


def _with_file(spec: Spec, file: Path, package: Path) -> Spec:
    """The spec with its task's file as a module of the app.

    Raises:
        ConfigurationError: the file cannot do without its neighbours; nothing stays of the app.
    """
    copy = package / "problem.py"
    attribute = spec.task.name.rpartition(":")[2]
    shutil.copy(file, copy)
    try:
        task_maker(f"{copy}:{attribute}")
    except ConfigurationError as error:
        shutil.rmtree(package.parent)
        advice = "a task of several files has to be an installed package: --task package.module:NAME"
        raise ConfigurationError(f"{error}; {advice}") from error
    return replace(spec, task=Named(f"{package.name}.problem:{attribute}", spec.task.fields))
