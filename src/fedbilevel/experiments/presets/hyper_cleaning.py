"""Step sizes for hyper_cleaning. A weight's slope is a mean's share, and steps on x grow with the number of samples."""

from fedbilevel.experiments.presets.table import (
    FEDBIO,
    HESSIAN_INVERTING,
    OWN_HYPERGRADIENTS,
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
    "iterations": 20,
    "client_lr": xyv(400.0, 0.1, 1e-4),
    "server_lr": xyv(40.0, 0.05, 0.2),
    "consensus_lr": 1.0,
    "batch_size": None,
}
AFBO: Fields = {**inner(rounds=3, client_lr=0.05, lr=0.3), "outer_lr": 300.0, **system_steps(0.05)}
HALF: dict[str, Fields] = {"afbo": {"wait_for": 9}}  # of 18 clients
DIGITS: dict[str, Fields] = {
    "adbo": {**CUTTING, "wait_for": 9, "max_staleness": 15},
    "sdbo": CUTTING,
    **each(SINGLE_LOOP, {"client_lr": xyv(0.001, 0.05, 0.05), "server_lr": xyv(100.0, 0.1, 0.1), "radius": 10.0}),
    **each(HESSIAN_INVERTING, {**inner(lr=0.3), "outer_lr": 1000.0, **neumann(step=0.1)}),
    **each(OWN_HYPERGRADIENTS, {**inner(lr=0.3), "outer_lr": 30.0, **neumann(step=0.1)}),
    "aggitd": {**inner(rounds=5, lr=0.3), "outer_lr": 1000.0, "sampling": None},
    **each(FEDBIO, {"client_lr": xyv(10.0, 0.05, 0.05)}),
    "afbo": AFBO,
}
CUTTING_MNIST: Fields = {
    "client_lr": xyv(8000.0, 0.1, 5e-6),
    "server_lr": xyv(800.0, 0.05, 0.2),
    "consensus_steps": 3,
    "consensus_lr": 0.1,
    "batch_size": 512,
}
# The Hessian-inverting methods step on x once a round: a small batch would move few weights, and those too far.
NESTED: Fields = {**inner(lr=1.0), "outer_lr": 10_000.0, **neumann(terms=20, step=0.1), "batch_size": 512}
MNIST: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"client_lr": xyv(0.001, 0.05, 0.05), "server_lr": xyv(500.0, 0.1, 0.1), "radius": 10.0}),
    **each(HESSIAN_INVERTING, NESTED),
    "fednest": merged(NESTED, inner(rounds=3), {"outer_lr": 30_000.0}, neumann(terms=10)),
    **each(OWN_HYPERGRADIENTS, {**inner(lr=1.0), "outer_lr": 1000.0, **neumann(step=0.1), "batch_size": 512}),
    "adbo": {**CUTTING_MNIST, "iterations": 20, "wait_for": 9, "max_staleness": 15},
    "sdbo": {**CUTTING_MNIST, "iterations": 10},
    "afbo": merged(AFBO, inner(client_lr=0.1, lr=1.0), {"outer_lr": 3000.0, "batch_size": 128}, system_steps(0.1)),
}

RUN = {"rounds": 300, "cohort": None, "eval_every": 10}
LIKE_MNIST = Preset(
    task={"validation": 0.2},
    shared={**local_steps(10), "batch_size": 64, **TERMS},
    algorithms=randomly(MNIST),
    asynchronous=HALF,
    run=RUN,
)

PRESETS: dict[str | None, Preset] = {
    None: Preset(
        shared={**local_steps(5), "batch_size": 32, **TERMS}, algorithms=randomly(DIGITS), asynchronous=HALF, run=RUN
    ),
    "mnist": LIKE_MNIST,
    "fashion-mnist": LIKE_MNIST,
}
