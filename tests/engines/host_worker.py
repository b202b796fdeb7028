"""One of several processes of a simulation: python host_worker.py HOST:PORT PROCESSES PROCESS FOLDER JOBS.

JOBS is JSON, a list of [name, function, arguments]. A function of this file returns a tree of arrays, which is written
to FOLDER/NAME.PROCESS.npz. The functions also run in the tests' own process, which is then the only one.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.engines.multihost import join
from fedbilevel.engines.process_group import current_group
from fedbilevel.tasks.quadratic import quadratic

seen = []
"""The path of the last checkpoint, as each call of a callback in `solved` has found it."""


def agreement(case, engine):
    """Return state, clients' states and costs after two rounds of a case of tests/algorithms/agreement.py."""
    sys.path += [str(Path(__file__).parents[1] / room) for room in ("algorithms", "")]
    from agreement import two_rounds

    return two_rounds(case, fb.Local(**engine))


def solved(rounds, checkpoint, resume=False, lr=0.1, stop_at=None, differ=False, fail_at=None, **engine):
    """Run FedAvg, whose program is small, with cohorts, unequal work and rows; return x, the rows and why it ended."""
    seen.clear()
    task = quadratic(clients=8, samples=(3, 9))
    result = fb.solve(
        fb.FedAvg(batch_size=4, lr=lr),
        fb.SingleLevel(lambda x, batch: task.problem.outer(x, task.y0 + 1, batch)),
        fb.Clients(task.clients.outer, weights=task.clients.weights, local_steps=(1, 4)),
        task.x0,
        None,
        rounds=rounds,
        cohort=5,
        engine=fb.Local(**engine),
        eval_every=2,
        metrics={"square": lambda x, y: x @ x},
        key=current_group().process if differ else 0,
        checkpoint=checkpoint,
        resume=resume,
        callbacks=[
            lambda result, row: seen.append(current_group().saved.path),
            lambda result, row: "far enough" if result.round == stop_at else None,
            lambda result, row: fail() if result.round == fail_at else None,
        ],
    )
    rows = [[value for name, value in sorted(row.items()) if name != "seconds"] for row in result.history.rows[1:]]
    return {"x": result.x, "rows": np.array(rows), "stopped": np.array(result.stopped)}


def fail():
    raise fb.errors.CheckpointError("no space for the picture")


def refused(function, **arguments):
    """Return the error with which a job ends."""
    try:
        globals()[function](**arguments)
    except fb.errors.FedbilevelError as error:
        return {"error": np.array(f"{type(error).__name__}: {error}")}
    return {"error": np.array("")}


def said(file, size):
    """Return what processes send each other: a word from each, a word from process 0, and a file of process 0.

    The file is longer than a message may be.
    """
    if current_group().is_first:
        Path(file).write_bytes(np.arange(size, dtype=np.uint8).tobytes())
    words = [current_group().gather({"process": current_group().process})[-1]["process"] for _ in range(3)]
    with current_group().copy_of(Path(file)) as copy:
        content = np.frombuffer(copy.read_bytes(), np.uint8)
    return {
        "last": np.array(words),
        "first": np.array(current_group().first(current_group().process)),
        "content": content,
    }


def main():
    coordinator, processes, process, folder, jobs = sys.argv[1:]
    join(coordinator, int(processes), int(process), patience=60)
    for name, function, arguments in json.loads(jobs):
        leaves = jax.tree_util.tree_leaves_with_path(globals()[function](**arguments))
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        np.savez(Path(folder) / f"{name}.{process}.npz", **arrays)


if __name__ == "__main__":
    main()
