"""Step sizes for the tasks on images other than hyper_representation, found on images held out from training."""

from fedbilevel.experiments.presets.hyper_representation import NARROW
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
    xyv,
)

NESTED: Fields = {**inner(rounds=3, lr=1.0), "outer_lr": 1.0, **neumann(terms=3, step=0.05)}
TUNING: dict[str, Fields] = {
    **each(HESSIAN_INVERTING, NESTED),
    "aggitd": {**inner(rounds=10, lr=0.3), "outer_lr": 1.0},
    **each(
        SINGLE_LOOP,
        {"client_lr": xyv(0.05, 0.05, 0.02), "server_lr": xyv(0.1, 0.1, 0.02), "radius": 10.0},
    ),
    **each(FEDBIO, {"client_lr": xyv(0.05, 0.05, 0.01)}),
}
TUNING_MNIST = {**TUNING, **each(HESSIAN_INVERTING, merged(NESTED, inner(lr=2.0)))}
LIKE_MNIST = Preset(
    task={"ratio": 0.01, "hidden": [200, 100], "clients": 100},
    shared={**local_steps(20), "batch_size": 50},
    algorithms=TUNING_MNIST,
    run={"rounds": 120, "cohort": 10, "eval_every": 10},
)

FAIR: dict[str, Fields] = {
    "fedavg-s": {"inner_lr": 1.0, "outer_lr": 0.3},
    **each(HESSIAN_INVERTING, {**inner(lr=5.0), "outer_lr": 0.3}),
    **each(SINGLE_LOOP, {"client_lr": xyv(0.1, 1.0, 1.0), "server_lr": xyv(0.1, 1.0, 1.0)}),
}

SMALL = {"rounds": 200, "cohort": 10, "eval_every": 10}
STEPS = {**local_steps(5), "batch_size": 32}
PRESETS: dict[str, dict[str | None, Preset]] = {
    "loss_tuning": {
        None: Preset(
            shared={**local_steps(10), "batch_size": 16},
            algorithms=TUNING,
            run={"rounds": 100, "cohort": 10, "eval_every": 5},
            networks=NARROW,
        ),
        "mnist": LIKE_MNIST,
        "fashion-mnist": LIKE_MNIST,
    },
    "classification": {
        None: Preset(shared=STEPS, algorithms={name: {"outer_lr": 0.6} for name in ("fedlin", "fedavg")}, run=SMALL)
    },
    "fair_classification": {None: Preset(shared={**STEPS, **TERMS}, algorithms=FAIR, run=SMALL)},
}
