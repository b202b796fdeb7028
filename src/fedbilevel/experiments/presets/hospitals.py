"""Steps for hospitals, found on held-out training patients. Clients use all their patients in each step: they are few.

A penalty's slope, exp(x_l) y_l², is small, and steps on x are large for it.
"""

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
    **each(SINGLE_LOOP, {"local_steps": 1, "client_lr": 1.0, "server_lr": xyv(3.0, 1.0, 1.0)}),
    **each(FEDBIO, {"client_lr": xyv(2.0, 0.2, 0.2)}),
    **each(HESSIAN_INVERTING, {**inner(rounds=3, lr=1.0), "outer_lr": 3.0, **neumann(name="cg")}),
    **each(("fedavg", "fedlin"), {"outer_lr": 1.0}),
}

PRESETS: dict[str | None, Preset] = {
    None: Preset(
        shared={**local_steps(5), "batch_size": None},
        algorithms=ALGORITHMS,
        run={"rounds": 300, "cohort": None, "eval_every": 30},
    )
}
