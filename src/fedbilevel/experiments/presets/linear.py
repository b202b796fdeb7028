"""Step sizes for tasks with linear models: hospitals, regularization, hyper_cleaning.

Those of hospitals were found on held-out training patients; clients use all their patients in each step: they are few.
There a penalty's slope, exp(x_l) y_l², is small, and so is that of one coefficient of regularization, exp(x_j)‖W_j‖²:
steps on x are large for them. In hyper_cleaning a weight's slope is a mean's share, and steps on x grow with the number
of samples.
"""

from fedbilevel.core.tables import Fields, merged
from fedbilevel.experiments.presets.table import (
    FEDBIO,
    HESSIAN_INVERTING,
    OWN_HYPERGRADIENTS,
    SINGLE_LOOP,
    TERMS,
    Preset,
    each,
    inner,
    local_steps,
    neumann,
    randomly,
    system_steps,
    xyv,
)

HOSPITALS: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"local_steps": 1, "client_lr": 1.0, "server_lr": xyv(3.0, 1.0, 1.0)}),
    **each(FEDBIO, {"client_lr": xyv(2.0, 0.2, 0.2)}),
    **each(HESSIAN_INVERTING, {**inner(rounds=3, lr=1.0), "outer_lr": 3.0, **neumann(name="cg")}),
    **each(("fedavg", "fedlin"), {"outer_lr": 1.0}),
}

PENALTY_CUTTING: Fields = {
    "client_lr": xyv(20.0, 0.3, 0.002),
    "server_lr": xyv(2.0, 0.05, 0.2),
    "estimate": {"steps": 3, "lr": 0.3},
    "batch_size": 256,
}
PENALTY_AFBO: Fields = {**inner(rounds=3, client_lr=0.1, lr=0.3), "outer_lr": 50.0, **system_steps(0.05)}
REGULARIZATION: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"client_lr": xyv(0.001, 0.05, 0.05), "server_lr": xyv(5.0, 0.1, 0.1)}),
    **each(HESSIAN_INVERTING, {**inner(lr=0.3), "outer_lr": 100.0, **neumann(step=0.1)}),
    "aggitd": {**inner(rounds=5, lr=0.1), "outer_lr": 50.0, "sampling": None},
    **each(FEDBIO, {"client_lr": xyv(1.0, 0.05, 0.05)}),
    "afbo": PENALTY_AFBO,
    "adbo": {**PENALTY_CUTTING, "iterations": 20, "wait_for": 9, "max_staleness": 15},
    "sdbo": {**PENALTY_CUTTING, "iterations": 10},
}
# Covertype's rows are many: larger batches bear larger steps.
COVERTYPE: dict[str, Fields] = {
    **REGULARIZATION,
    "fednest": {**inner(rounds=3, lr=3.0), "outer_lr": 300.0, **neumann(step=0.1), "batch_size": 256},
    "afbo": merged(PENALTY_AFBO, inner(lr=1.0), {"batch_size": 64}),
    "adbo": {
        **PENALTY_CUTTING,
        "client_lr": xyv(20.0, 1.0, 0.002),
        "iterations": 20,
        "wait_for": 9,
        "max_staleness": 15,
    },
    "sdbo": {**PENALTY_CUTTING, "client_lr": xyv(20.0, 1.0, 0.002), "iterations": 10},
}
HALF: dict[str, Fields] = {"afbo": {"wait_for": 9}}  # of 18 clients
RUN = {"rounds": 300, "cohort": None, "eval_every": 10}

CLEANING_CUTTING: Fields = {
    "iterations": 20,
    "client_lr": xyv(400.0, 0.1, 1e-4),
    "server_lr": xyv(40.0, 0.05, 0.2),
    "estimate": {"lr": 1.0},
    "batch_size": None,
}
CLEANING_AFBO: Fields = {**inner(rounds=3, client_lr=0.05, lr=0.3), "outer_lr": 300.0, **system_steps(0.05)}
CLEANING_ON_DIGITS: dict[str, Fields] = {
    "adbo": {**CLEANING_CUTTING, "wait_for": 9, "max_staleness": 15},
    "sdbo": CLEANING_CUTTING,
    **each(SINGLE_LOOP, {"client_lr": xyv(0.001, 0.05, 0.05), "server_lr": xyv(100.0, 0.1, 0.1), "radius": 10.0}),
    **each(HESSIAN_INVERTING, {**inner(lr=0.3), "outer_lr": 1000.0, **neumann(step=0.1)}),
    **each(OWN_HYPERGRADIENTS, {**inner(lr=0.3), "outer_lr": 30.0, **neumann(step=0.1)}),
    "aggitd": {**inner(rounds=5, lr=0.3), "outer_lr": 1000.0, "sampling": None},
    **each(FEDBIO, {"client_lr": xyv(10.0, 0.05, 0.05)}),
    "afbo": CLEANING_AFBO,
}
CUTTING_MNIST: Fields = {
    "client_lr": xyv(8000.0, 0.1, 5e-6),
    "server_lr": xyv(800.0, 0.05, 0.2),
    "estimate": {"steps": 3, "lr": 0.1},
    "batch_size": 512,
}
# The Hessian-inverting methods step on x once a round: a small batch would move few weights, and those too far.
NESTED: Fields = {**inner(lr=1.0), "outer_lr": 10_000.0, **neumann(terms=20, step=0.1), "batch_size": 512}
CLEANING_ON_MNIST: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"client_lr": xyv(0.001, 0.05, 0.05), "server_lr": xyv(500.0, 0.1, 0.1), "radius": 10.0}),
    **each(HESSIAN_INVERTING, NESTED),
    "fednest": merged(NESTED, inner(rounds=3), {"outer_lr": 30_000.0}, neumann(terms=10)),
    **each(OWN_HYPERGRADIENTS, {**inner(lr=1.0), "outer_lr": 1000.0, **neumann(step=0.1), "batch_size": 512}),
    "adbo": {**CUTTING_MNIST, "iterations": 20, "wait_for": 9, "max_staleness": 15},
    "sdbo": {**CUTTING_MNIST, "iterations": 10},
    "afbo": merged(
        CLEANING_AFBO, inner(client_lr=0.1, lr=1.0), {"outer_lr": 3000.0, "batch_size": 128}, system_steps(0.1)
    ),
}

CLEANING_MNIST = Preset(
    task={"validation": 0.2},
    shared={**local_steps(10), "batch_size": 64, **TERMS},
    algorithms=randomly(CLEANING_ON_MNIST),
    asynchronous=HALF,
    run=RUN,
)

PRESETS: dict[str, dict[str | None, Preset]] = {
    "hospitals": {
        None: Preset(
            shared={**local_steps(5), "batch_size": None},
            algorithms=HOSPITALS,
            run={"rounds": 300, "cohort": None, "eval_every": 30},
        )
    },
    "regularization": {
        None: Preset(
            shared={**local_steps(5), "batch_size": 32, **TERMS},
            algorithms=randomly(REGULARIZATION),
            asynchronous=HALF,
            run=RUN,
        ),
        "covtype": Preset(
            shared={**local_steps(5), "batch_size": 32, **TERMS},
            algorithms=randomly(COVERTYPE),
            asynchronous=HALF,
            run=RUN,
        ),
    },
    "hyper_cleaning": {
        None: Preset(
            shared={**local_steps(5), "batch_size": 32, **TERMS},
            algorithms=randomly(CLEANING_ON_DIGITS),
            asynchronous=HALF,
            run=RUN,
        ),
        "mnist": CLEANING_MNIST,
        "fashion-mnist": CLEANING_MNIST,
    },
}
