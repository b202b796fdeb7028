"""Step sizes for the small problems with closed forms: saddle, compositional, portfolio. Full batches, everyone."""

from fedbilevel.experiments.presets.table import (
    FEDBIO,
    HESSIAN_INVERTING,
    SINGLE_LOOP,
    Fields,
    Preset,
    each,
    inner,
    local_steps,
    xyv,
)

NESTED: Fields = {**inner(lr=0.5), "outer_lr": 0.05}
SADDLE: dict[str, Fields] = {
    "fedavg-s": {"inner_lr": 0.5, "outer_lr": 0.05},
    **each((*HESSIAN_INVERTING, "aggitd"), NESTED),
    **each(("fednest", "fednest-sgd", "lfednest"), {**NESTED, "outer_steps": 5}),
    **each(SINGLE_LOOP, {"client_lr": xyv(1e-4, 1e-3, 1e-3), "server_lr": xyv(0.01, 0.1, 0.1)}),
    **each(FEDBIO, {"client_lr": xyv(0.005, 0.05, 0.05)}),
}
COMPOSITIONAL: dict[str, Fields] = {
    **each(HESSIAN_INVERTING, {**inner(lr=1.0), "outer_lr": 0.3}),
    **each(SINGLE_LOOP, {"client_lr": xyv(1e-3, 1e-3, 1e-3), "server_lr": xyv(0.1, 0.5, 0.5)}),
    "aggitd": {**inner(rounds=1, lr=1.0), "outer_lr": 0.3},
    **each(FEDBIO, {"client_lr": xyv(0.05, 0.5, 0.5)}),
}

RUN = {"rounds": 200, "cohort": None, "eval_every": 5}
PRESETS: dict[str, dict[str | None, Preset]] = {
    "saddle": {None: Preset(shared={**local_steps(5), "batch_size": None}, algorithms=SADDLE, run=RUN)},
    "compositional": {None: Preset(shared={**local_steps(1), "batch_size": None}, algorithms=COMPOSITIONAL, run=RUN)},
    "portfolio": {None: Preset(shared={**local_steps(1), "batch_size": None}, algorithms=COMPOSITIONAL, run=RUN)},
}
