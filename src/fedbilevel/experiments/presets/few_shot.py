"""Step sizes and sizes for few_shot, by data set.

A client's step moves the heads of its own tasks alone, and the server's mean over M = 10 clients takes a tenth of that:
hence server steps of y and v that are ten times the clients'. Of features of mean square 1 a task's inner Hessian is at
most 9 (½·17 channels and a bias), a fifth of it in a batch of five tasks, whatever x is.
"""

from fedbilevel.experiments.presets.table import (
    HESSIAN_INVERTING,
    OWN_HYPERGRADIENTS,
    SINGLE_LOOP,
    Fields,
    Preset,
    each,
    xyv,
)

NESTED = {
    "inner_lr": 12.0,
    "inner_server_lr": 10.0,
    "outer_lr": 0.5,
    "neumann_terms": 10,
    "neumann_step": 0.6,
}
PAIRED = {**NESTED, "paired": True}
SINGLE = {"local_steps": 2, "client_lr": xyv(0.6, 0.6, 0.6), "server_lr": xyv(0.5, 10.0, 10.0), "radius": 10.0}
ALGORITHMS: dict[str, Fields] = {
    **each(SINGLE_LOOP, SINGLE),
    **each(HESSIAN_INVERTING, NESTED),
    **each(OWN_HYPERGRADIENTS, PAIRED),
    "fedavg": {"local_steps": 5, "outer_lr": 0.5, "batch_size": 2},
}
PRESET = Preset(
    task={"hidden": [16]},
    shared={"local_steps": 20, "batch_size": 5},
    algorithms=ALGORITHMS,
    run={"rounds": 100, "cohort": 10, "eval_every": 10},
)
PRESETS: dict[str | None, Preset] = {None: PRESET}
