"""Step sizes for hospitals, found on held-out training patients. Every client uses all its samples: they are few."""

from fedbilevel.experiments.presets.table import (
    FEDBIO,
    HESSIAN_INVERTING,
    SINGLE_LOOP,
    Fields,
    Preset,
    each,
    inner,
    local_steps,
    neumann,
    xyv,
)

ALGORITHMS: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"client_lr": xyv(1.0, 0.3, 0.3), "server_lr": xyv(3.0, 1.0, 1.0)}),
    **each(HESSIAN_INVERTING, {**inner(rounds=3, lr=0.3), "outer_lr": 3.0, **neumann(step=0.1)}),
    **each(FEDBIO, {"client_lr": xyv(3.0, 0.3, 0.3)}),
    **each(("fedavg", "fedlin"), {"outer_lr": 1.0}),
}

PRESETS: dict[str | None, Preset] = {
    None: Preset(
        shared={**local_steps(1), "batch_size": None},
        algorithms=ALGORITHMS,
        run={"rounds": 300, "cohort": None, "eval_every": 10},
    )
}
