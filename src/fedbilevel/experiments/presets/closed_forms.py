"""Step sizes for the small problems with closed forms: quadratic, saddle, compositional, portfolio.

Full batches, everyone; where a method ends is then off by a multiple of its clients' steps.
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
QUADRATIC: dict[str, Fields] = {
    "adbo": {**CUTTING, "wait_for": 5, "max_staleness": 10},
    "sdbo": CUTTING,
    **each(SINGLE_LOOP, {"client_lr": xyv(1e-4, 1e-3, 1e-3), "server_lr": xyv(0.01, 0.1, 0.1)}),
    **each(HESSIAN_INVERTING, {**inner(rounds=5, lr=1.0), "outer_lr": 0.1, **CONJUGATE_GRADIENT}),
    "afbo": {**inner(rounds=2, client_lr=0.001, lr=0.3), "outer_lr": 0.02, **system_steps(0.3)},
    "aggitd": {**inner(rounds=20, lr=1.0), "outer_lr": 0.1},
    **each(FEDBIO, {"client_lr": xyv(0.002, 0.05, 0.05)}),
}
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
    "quadratic": {
        None: Preset(
            shared={**local_steps(5), "batch_size": None},
            algorithms=QUADRATIC,
            run={"rounds": 500, "cohort": None, "eval_every": 10},
        )
    },
    "saddle": {None: Preset(shared={**local_steps(5), "batch_size": None}, algorithms=SADDLE, run=RUN)},
    "compositional": {None: Preset(shared={**local_steps(1), "batch_size": None}, algorithms=COMPOSITIONAL, run=RUN)},
    "portfolio": {None: Preset(shared={**local_steps(1), "batch_size": None}, algorithms=COMPOSITIONAL, run=RUN)},
}
