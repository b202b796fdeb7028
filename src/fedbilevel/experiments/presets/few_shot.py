"""Step sizes and sizes for few_shot, by data set.

A client's step moves the heads of its own tasks alone, and the server's mean over M = 10 clients takes a tenth of that:
hence the factors of ten in server steps of y and v, and in the Neumann steps of hypergradients that are global. Under
capacities what few hold goes beyond the client's own step (of those from 1 to 1/16, by up to five times); on Omniglot
that did better than the bound of twice the mean: 67.6 against 64.4 % (one seed).
A task's inner Hessian is at most ½·(16 + 1) = 8.5, of 16 features of mean square below 1 and a bias: with more features
steps on y and Neumann steps must be shorter. In a batch of five tasks it counts for a fifth, or more where one is drawn
again.
"""

from fedbilevel.experiments.presets.table import (
    HESSIAN_INVERTING,
    OWN_HYPERGRADIENTS,
    SINGLE_LOOP,
    Fields,
    Preset,
    each,
    inner,
    local_steps,
    merged,
    neumann,
    randomly,
    xyv,
)

NESTED = {**inner(lr=12.0, server_lr=10.0), "outer_lr": 0.5, **neumann(terms=10, step=0.6)}
PAIRED = merged(NESTED, {"hypergradient": {"paired": True}})
SINGLE = {"local_steps": 2, "client_lr": xyv(0.6, 0.6, 0.6), "server_lr": xyv(0.5, 10.0, 10.0), "radius": 10.0}
ALGORITHMS: dict[str, Fields] = {
    **each(SINGLE_LOOP, SINGLE),
    **each(HESSIAN_INVERTING, merged(NESTED, neumann(step=6.0))),
    **each(OWN_HYPERGRADIENTS, PAIRED),
    "fedavg": {"local_steps": 5, "outer_lr": 0.5, "batch_size": 2},
}
PRESET = Preset(
    task={"hidden": [16]},
    shared={**local_steps(20), "batch_size": 5},
    algorithms=randomly(ALGORITHMS),
    run={"rounds": 100, "eval_every": 10},
    networks={name: {"hidden": [16, 16, 16, 16]} for name in ("resnet12", "resnet18")},
)
PRESETS: dict[str | None, Preset] = {None: PRESET}
