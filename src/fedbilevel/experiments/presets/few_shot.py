"""Step sizes and sizes for few_shot, by data set.

A client's step moves the columns of its own characters alone, and the server's mean over M = 10 clients takes a tenth
of that: hence server steps of y and v that are ten times the clients'.
"""

from fedbilevel.experiments.presets.table import SINGLE_LOOP, Fields, Preset, each, xyv

ALGORITHMS: dict[str, Fields] = {
    **each(
        SINGLE_LOOP,
        {"client_lr": xyv(0.2, 0.05, 0.05), "server_lr": xyv(0.2, 0.5, 0.5), "radius": 10.0},
    ),
    "fedavg": {"outer_lr": 0.4, "local_steps": 4},
}
SMALL = Preset(
    task={"hidden": [16]},
    shared={"local_steps": 2, "batch_size": 10},
    algorithms=ALGORITHMS,
    run={"rounds": 100, "cohort": 10, "eval_every": 10},
)

OMNIGLOT = Preset(
    task={"hidden": [16]},
    shared={"local_steps": 2, "batch_size": 20},
    algorithms={
        **ALGORITHMS,
        **each(
            SINGLE_LOOP,
            {"client_lr": xyv(0.5, 0.1, 0.1), "server_lr": xyv(0.5, 1.0, 1.0), "radius": 10.0},
        ),
        "fedavg": {"outer_lr": 0.4, "local_steps": 4, "batch_size": 10},
    },
    run=SMALL.run,
)

PRESETS: dict[str | None, Preset] = {None: SMALL, "omniglot": OMNIGLOT}
