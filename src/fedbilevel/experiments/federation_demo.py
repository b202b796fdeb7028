"""A federation of real processes on this machine, for a first look."""

from __future__ import annotations

from pathlib import Path

from fedbilevel.experiments.flower_app import write_app
from fedbilevel.experiments.folder import LoadedRun, load_run
from fedbilevel.experiments.places import default_path, require_free
from fedbilevel.experiments.spec import Spec


def play(spec: Spec, clients: int, out: Path | None, persistent: bool) -> LoadedRun:
    """Start SuperLink and SuperNodes, play the spec with them, stop them; tell it as it goes on.

    Args:
        out: a new or empty folder for the app, the run, keys and logs; None chooses one in ./runs.
        persistent: whether clients' processes stay between messages.
    """
    from fedbilevel.flower.launch.processes import Federation

    folder = (out or default_path("flower-demo")).resolve()
    require_free(folder)
    app, run = folder / "demo", folder / "run"
    write_app(spec, app)
    print(
        f"starting a SuperLink and {clients} SuperNodes, with TLS and a key each; logs in {folder / 'logs'}", flush=True
    )
    with Federation(folder, clients, persistent=persistent) as federation:
        print(f"online at {federation.address}; {spec.title}", flush=True)
        for line in federation.run(app, f'out="{run}" client-keys="{federation.credentials.ca.parent}"'):
            print(line, end="", flush=True)
    done = load_run(run)
    print(f"all stopped\nplot  {done.folder.plot}")
    return done
