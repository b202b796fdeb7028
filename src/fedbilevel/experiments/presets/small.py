"""Step sizes for small problems: those with closed forms, and the simple bilevel ones, location and selection.

Those with closed forms (quadratic, saddle, compositional, portfolio) take full batches of everyone; where a method ends
is then off by a multiple of its clients' steps.

Steps of location were found on its default, 40 overlapping balls, by the error of x, which that layout knows. There λ
is against 1/m: an F with kinks has its own minimisers for minimisers of F + λH once λ is some share of that.
In selection λ_k are the same for all methods, so that they chase the same points, the minimisers of F + λ_k H; steps
were chosen by F + λ_k H on the training rows in the last round. λ₁ of mnist and a9a was chosen on rows held out of
training.
"""

from fedbilevel.core.tables import Fields
from fedbilevel.experiments.presets.table import (
    ALONE,
    FEDBIO,
    HESSIAN_INVERTING,
    SINGLE_LOOP,
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
    "estimate": {"lr": 0.7},
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
SADDLE_NESTED: Fields = {**inner(lr=0.5), "outer_lr": 0.05}
SADDLE: dict[str, Fields] = {
    "fedavg-s": {"inner_lr": 0.5, "outer_lr": 0.05},
    **each((*HESSIAN_INVERTING, "aggitd"), SADDLE_NESTED),
    **each(("fednest", "fednest-sgd", "lfednest"), {**SADDLE_NESTED, "outer_steps": 5}),
    **each(SINGLE_LOOP, {"client_lr": xyv(1e-4, 1e-3, 1e-3), "server_lr": xyv(0.01, 0.1, 0.1)}),
    **each(FEDBIO, {"client_lr": xyv(0.005, 0.05, 0.05)}),
}
COMPOSITIONAL: dict[str, Fields] = {
    **each(HESSIAN_INVERTING, {**inner(lr=1.0), "outer_lr": 0.3}),
    **each(SINGLE_LOOP, {"client_lr": xyv(1e-3, 1e-3, 1e-3), "server_lr": xyv(0.1, 0.5, 0.5)}),
    "aggitd": {**inner(rounds=1, lr=1.0), "outer_lr": 0.3},
    **each(FEDBIO, {"client_lr": xyv(0.05, 0.5, 0.5)}),
}

CLOSED_FORM_RUN = {"rounds": 200, "cohort": None, "eval_every": 5}

LOCATION: dict[str, Fields] = {"fism": {"lr": 1.0}, "irig": {"lr": 0.3}, "irg": {"lr": 10.0}, "bi-fista": {"lr": 0.1}}
SELECTION: dict[str, Fields] = {"fism": {"lr": 0.3}, "irig": {"lr": 0.1}, "irg": {"lr": 10.0}, "bi-fista": {"lr": 0.3}}
LIKE_MNIST = Preset(
    shared={"regularization": 5e-4, "regularization_decay": 0.2},
    algorithms={
        "fism": {"lr": 0.1, "lr_decay": 0.75},
        "irig": {"lr": 0.03},
        "irg": {"lr": 1.0},
        "bi-fista": {"lr": 0.1},
    },
    run={"rounds": 100, "cohort": None, "eval_every": 5},
    runs=ALONE,
)
A9A = Preset(
    shared={"regularization": 0.001},
    algorithms={"fism": {"lr": 0.03}, "irig": {"lr": 0.01}, "irg": {"lr": 10.0}, "bi-fista": {"lr": 0.3}},
    run=LIKE_MNIST.run,
    runs=ALONE,
)

PRESETS: dict[str, dict[str | None, Preset]] = {
    "quadratic": {
        None: Preset(
            shared={**local_steps(5), "batch_size": None},
            algorithms=QUADRATIC,
            run={"rounds": 500, "cohort": None, "eval_every": 10},
        )
    },
    "saddle": {None: Preset(shared={**local_steps(5), "batch_size": None}, algorithms=SADDLE, run=CLOSED_FORM_RUN)},
    "compositional": {
        None: Preset(shared={**local_steps(1), "batch_size": None}, algorithms=COMPOSITIONAL, run=CLOSED_FORM_RUN)
    },
    "portfolio": {
        None: Preset(shared={**local_steps(1), "batch_size": None}, algorithms=COMPOSITIONAL, run=CLOSED_FORM_RUN)
    },
    "location": {
        None: Preset(
            shared={"regularization": 0.03},
            algorithms=LOCATION,
            run={"rounds": 1000, "cohort": None, "eval_every": 20},
            runs=ALONE,
        )
    },
    "selection": {
        None: Preset(
            shared={"regularization": 0.05},
            algorithms=SELECTION,
            run={"rounds": 300, "cohort": None, "eval_every": 10},
            runs=ALONE,
        ),
        "mnist": LIKE_MNIST,
        "fashion-mnist": LIKE_MNIST,
        "a9a": A9A,
    },
}
