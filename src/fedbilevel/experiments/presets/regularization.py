"""Step sizes for regularization. One coefficient's slope is small, exp(x_j)‖W_j‖², and steps on x are large for it."""

from fedbilevel.experiments.presets.table import FEDBIO, HESSIAN_INVERTING, SINGLE_LOOP, Fields, Preset, each, xyv

ALGORITHMS: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"client_lr": xyv(0.001, 0.05, 0.05), "server_lr": xyv(5.0, 0.1, 0.1)}),
    **each(HESSIAN_INVERTING, {"inner_lr": 0.3, "outer_lr": 100.0, "neumann_step": 0.1}),
    "aggitd": {"inner_rounds": 5, "inner_lr": 0.1, "outer_lr": 50.0, "inverse": "series"},
    **each(FEDBIO, {"client_lr": xyv(1.0, 0.05, 0.05)}),
    "afbo": {
        "first": 9,
        "inner_rounds": 3,
        "hypergradient": "global",
        "client_lr": 0.1,
        "inner_lr": 0.3,
        "outer_lr": 50.0,
        "system_lr": 0.05,
    },
}

PRESETS: dict[str | None, Preset] = {
    None: Preset(
        shared={"local_steps": 5, "batch_size": 32},
        algorithms=ALGORITHMS,
        run={"rounds": 300, "cohort": None, "eval_every": 10},
    )
}
