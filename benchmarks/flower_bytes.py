"""Does the ledger count the bytes that travel? `python benchmarks/flower_bytes.py`: a federation of processes, models
of several sizes; the ledger's bytes beside what the SuperLink says to have sent and received for the run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fedbilevel.experiments import configure, load_run
from fedbilevel.experiments.federation import write_app
from fedbilevel.flower.launch.processes import CONNECTION, Federation

CLIENTS, ROUNDS = 2, 10


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, Federation(Path(scratch) / "federation", CLIENTS) as federation:
        for hidden in (8, 64, 512, 4096):
            settings = [f"task.clients={CLIENTS}", f"run.rounds={ROUNDS}", f"task.hidden=[{hidden}]", "run.cohort=none"]
            app, out = Path(scratch) / f"width{hidden}", Path(scratch) / f"run{hidden}"
            write_app(configure(settings=[*settings, "run.eval_every=10"]), app)
            lines = list(federation.run(app, f'out="{out}"'))
            number = next(line.rpartition(" ")[2].strip() for line in lines if "started run" in line)
            shown = federation.console.read("list", "--run-id", number, CONNECTION)
            traffic = shown["runs"][0]["network-traffic"]
            ledger = load_run(out).ledger
            mine = ledger["bytes_down"] + ledger["bytes_up"]
            each = mine / (2 * CLIENTS * ROUNDS)
            print(f"{each:12,.0f} bytes a message: ledger {mine:,}, SuperLink {traffic}", flush=True)


if __name__ == "__main__":
    main()
