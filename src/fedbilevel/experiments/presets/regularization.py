"""Step sizes for regularization. One coefficient's slope is small, exp(x_j)‖W_j‖², and steps on x are large for it."""

from fedbilevel.experiments.presets.table import (
    FEDBIO,
    HESSIAN_INVERTING,
    SINGLE_LOOP,
    TERMS,
    Fields,
    Preset,
    each,
    inner,
    local_steps,
    merged,
    neumann,
    randomly,
    system_steps,
    xyv,
)

CUTTING: Fields = {
    "client_lr": xyv(20.0, 0.3, 0.002),
    "server_lr": xyv(2.0, 0.05, 0.2),
    "consensus_steps": 3,
    "consensus_lr": 0.3,
    "batch_size": 256,
}
AFBO: Fields = {**inner(rounds=3, client_lr=0.1, lr=0.3), "outer_lr": 50.0, **system_steps(0.05)}
ALGORITHMS: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"client_lr": xyv(0.001, 0.05, 0.05), "server_lr": xyv(5.0, 0.1, 0.1)}),
    **each(HESSIAN_INVERTING, {**inner(lr=0.3), "outer_lr": 100.0, **neumann(step=0.1)}),
    "aggitd": {**inner(rounds=5, lr=0.1), "outer_lr": 50.0, "sampling": None},
    **each(FEDBIO, {"client_lr": xyv(1.0, 0.05, 0.05)}),
    "afbo": AFBO,
    "adbo": {**CUTTING, "iterations": 20, "wait_for": 9, "max_staleness": 15},
    "sdbo": {**CUTTING, "iterations": 10},
}
# Covertype's rows are many: larger batches bear larger steps.
COVERTYPE: dict[str, Fields] = {
    **ALGORITHMS,
    "fednest": {**inner(rounds=3, lr=3.0), "outer_lr": 300.0, **neumann(step=0.1), "batch_size": 256},
    "afbo": merged(AFBO, inner(lr=1.0), {"batch_size": 64}),
    "adbo": {**CUTTING, "client_lr": xyv(20.0, 1.0, 0.002), "iterations": 20, "wait_for": 9, "max_staleness": 15},
    "sdbo": {**CUTTING, "client_lr": xyv(20.0, 1.0, 0.002), "iterations": 10},
}
HALF: dict[str, Fields] = {"afbo": {"wait_for": 9}}  # of 18 clients
RUN = {"rounds": 300, "cohort": None, "eval_every": 10}

PRESETS: dict[str | None, Preset] = {
    None: Preset(
        shared={**local_steps(5), "batch_size": 32, **TERMS},
        algorithms=randomly(ALGORITHMS),
        asynchronous=HALF,
        run=RUN,
    ),
    "covtype": Preset(
        shared={**local_steps(5), "batch_size": 32, **TERMS},
        algorithms=randomly(COVERTYPE),
        asynchronous=HALF,
        run=RUN,
    ),
}
