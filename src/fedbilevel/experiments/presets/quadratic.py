"""Step sizes for the quadratic. With full batches, where a method ends is off by a multiple of its clients' steps."""

from fedbilevel.experiments.presets.table import (
    FEDBIO,
    HESSIAN_INVERTING,
    SINGLE_LOOP,
    Fields,
    Preset,
    each,
    inner,
    local_steps,
    system_steps,
    xyv,
)

CONJUGATE_GRADIENT: Fields = {"hypergradient": {"solver": {"name": "cg", "tolerance": 1e-6}}}
CUTTING: Fields = {
    "iterations": 20,
    "client_lr": xyv(0.2, 0.05, 0.2),
    "server_lr": xyv(0.02, 0.02, 0.2),
    "consensus_lr": 0.7,
}
ALGORITHMS: dict[str, Fields] = {
    "adbo": {**CUTTING, "wait_for": 5, "max_staleness": 10},
    "sdbo": CUTTING,
    **each(SINGLE_LOOP, {"client_lr": xyv(1e-4, 1e-3, 1e-3), "server_lr": xyv(0.01, 0.1, 0.1)}),
    **each(HESSIAN_INVERTING, {**inner(rounds=5, lr=1.0), "outer_lr": 0.1, **CONJUGATE_GRADIENT}),
    "afbo": {**inner(rounds=2, client_lr=0.001, lr=0.3), "outer_lr": 0.02, **system_steps(0.3)},
    "aggitd": {**inner(rounds=20, lr=1.0), "outer_lr": 0.1},
    **each(FEDBIO, {"client_lr": xyv(0.002, 0.05, 0.05)}),
}

PRESETS: dict[str | None, Preset] = {
    None: Preset(
        shared={**local_steps(5), "batch_size": None},
        algorithms=ALGORITHMS,
        run={"rounds": 500, "cohort": None, "eval_every": 10},
    )
}
