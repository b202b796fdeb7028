"""Values that work, for each task and data set: what a spec does not say is taken from here.

A field that an algorithm does not have is left out; what is in neither is the algorithm's or the task's own default.
First what the tables share; then, for each kind of problem, one table of algorithms for each task and data set.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbilevel.core.tables import Fields, merged

HESSIAN_INVERTING = ("fednest", "fednest-sgd", "lfednest", "fedmbo", "rabo", "rafbo")
OWN_HYPERGRADIENTS = ("lfednest", "rabo", "rafbo")
SINGLE_LOOP = ("simfbo", "shrofbo")
FEDBIO = ("fedbio", "fedbioacc")
"""Methods with the same fields."""
RUNS: Mapping[str, Fields] = {
    "adbo": {"cohort": None},
    "sdbo": {"cohort": None},
    "irig": {"cohort": None, "pooled": True},
}
"""What methods need of [run] that are for all clients in every round, or for a single client."""


@dataclass(frozen=True)
class Preset:
    """Defaults for one task on one data set."""

    task: Fields = field(default_factory=dict)
    shared: Fields = field(default_factory=dict)  # for every algorithm that has such a field
    algorithms: Mapping[str, Fields] = field(default_factory=dict)  # by name
    asynchronous: Mapping[str, Fields] = field(default_factory=dict)  # of [asynchronous], for an algorithm by name
    run: Fields = field(default_factory=dict)
    networks: Mapping[str, Fields] = field(default_factory=dict)  # of the task, for a network that is asked for

    def of_task(self, network: Any) -> dict[str, Any]:
        return {**self.task, **next((fields for name, fields in self.networks.items() if name == network), {})}

    def of(self, algorithm: str) -> dict[str, Any]:
        return merged(self.shared, self.algorithms.get(algorithm, {}))

    def of_run(self, algorithm: str) -> dict[str, Any]:
        """What is set of [run]; a user's own task says by itself who is asked."""
        return {**self.run, **RUNS.get(algorithm, {})} if self.run else {}


def each(algorithms: Iterable[str], fields: Fields) -> dict[str, Fields]:
    """A table with these fields for each of the algorithms."""
    return dict.fromkeys(algorithms, fields)


def local_steps(count: int) -> Fields:
    """τ of every method: a field of its own, or one of its inner rounds."""
    return {"local_steps": count, **inner(local_steps=count)}


def inner(**fields: float) -> Fields:
    """Fields of the inner rounds."""
    return {"inner": fields}


def neumann(**fields: float | str) -> Fields:
    """Fields of the Neumann series."""
    return {"hypergradient": {"solver": fields}}


def system_steps(lr: float) -> Fields:
    """AFBO's hypergradient by steps on a v kept by the server, of that size."""
    return {"hypergradient": {"name": "steps", "lr": lr}}


RANDOM_LENGTHS: Mapping[str, Fields] = {
    **dict.fromkeys(("fednest", "fednest-sgd", "lfednest"), neumann(sampling="random")),
    "fedmbo": neumann(sampling="random_per_client"),
    "aggitd": {"sampling": "random"},
}
"""The products of random length of the papers. Their variance is small where N·s·ℓ is."""
TERMS = neumann(terms=5)
"""Fewer than the methods' default: a short series, with which these presets' steps were chosen."""


def randomly(table: Mapping[str, Fields]) -> dict[str, Fields]:
    """The table with products of random length for each method whose paper has them, if its fields say no other."""
    return {name: merged(RANDOM_LENGTHS.get(name, {}), fields) for name, fields in table.items()}


def xyv(x: float, y: float, v: float) -> dict[str, float]:
    """Three step sizes in the spec's form."""
    return {"x": x, "y": y, "v": v}


# Small problems: those with closed forms, and the simple bilevel ones, location and selection.
#
# Those with closed forms (quadratic, saddle, compositional, portfolio) take full batches of everyone; where a method
# ends is then off by a multiple of its clients' steps.
#
# Steps of location were found on its default, 40 overlapping balls, by the error of x, which that layout knows. There λ
# is against 1/m: an F with kinks has its own minimisers for minimisers of F + λH once λ is some share of that. In
# selection λ_k are the same for all methods, so that they chase the same points, the minimisers of F + λ_k H; steps
# were chosen by F + λ_k H on the training rows in the last round. λ₁ of mnist and a9a was chosen on rows held out of
# training.

CONJUGATE_GRADIENT: Fields = {"hypergradient": {"solver": {"name": "cg", "tolerance": 1e-6}}}
QUADRATIC_CUTTING: Fields = {
    "iterations": 20,
    "client_lr": xyv(0.2, 0.05, 0.2),
    "server_lr": xyv(0.02, 0.02, 0.2),
    "estimate": {"lr": 0.7},
}
QUADRATIC: dict[str, Fields] = {
    "adbo": {**QUADRATIC_CUTTING, "wait_for": 5, "max_staleness": 10},
    "sdbo": QUADRATIC_CUTTING,
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
SELECTION_RUN = {"rounds": 100, "cohort": None, "eval_every": 5}
AFFINE = Preset(shared={**local_steps(1), "batch_size": None}, algorithms=COMPOSITIONAL, run=CLOSED_FORM_RUN)


# Tasks with linear models: hospitals, regularization, hyper_cleaning.
#
# Those of hospitals were found on held-out training patients; clients use all their patients in each step: they are
# few. There a penalty's slope, exp(x_l) y_l², is small, and so is that of one coefficient of regularization,
# exp(x_j)‖W_j‖²: steps on x are large for them. In hyper_cleaning a weight's slope is a mean's share, and steps on x
# grow with the number of samples.

HOSPITALS: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"local_steps": 1, "client_lr": 1.0, "server_lr": xyv(3.0, 1.0, 1.0)}),
    **each(FEDBIO, {"client_lr": xyv(2.0, 0.2, 0.2)}),
    **each(HESSIAN_INVERTING, {**inner(rounds=3, lr=1.0), "outer_lr": 3.0, **neumann(name="cg")}),
    "fedavg": {"lr": 0.2},
    "fedlin": {"outer_lr": 1.0},
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
    **{name: {**REGULARIZATION[name], "client_lr": xyv(20.0, 1.0, 0.002)} for name in ("adbo", "sdbo")},
}
HALF: dict[str, Fields] = {"afbo": {"wait_for": 9}}  # of 18 clients
LINEAR_RUN = {"rounds": 300, "cohort": None, "eval_every": 10}
LOG_PENALTY = [-12.0, 0.0]
"""The range of x where it is the logarithm of a penalty on standardised features: beyond 1 a model is all penalty."""
PENALTIES_RUN = {**LINEAR_RUN, "x_bounds": LOG_PENALTY}


def linear(algorithms: Mapping[str, Fields], run: Fields = LINEAR_RUN) -> Preset:
    """What two of these tasks share."""
    shared = {**local_steps(5), "batch_size": 32, **TERMS}
    return Preset(shared=shared, algorithms=randomly(algorithms), asynchronous=HALF, run=run)


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
CLEANING_CUTTING_MNIST: Fields = {
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
    "adbo": {**CLEANING_CUTTING_MNIST, "iterations": 20, "wait_for": 9, "max_staleness": 15},
    "sdbo": {**CLEANING_CUTTING_MNIST, "iterations": 10},
    "afbo": merged(
        CLEANING_AFBO, inner(client_lr=0.1, lr=1.0), {"outer_lr": 3000.0, "batch_size": 128}, system_steps(0.1)
    ),
}


# Tasks with networks on images: hyper_representation, loss_tuning, classifications, few_shot.
#
# Those other than hyper_representation's were found on images held out from training.

SIMFBO = {"client_lr": xyv(0.1, 0.1, 0.1), "server_lr": xyv(0.1, 0.1, 0.1), "radius": 10.0}

# Of ADBO and SDBO: the best of six settings for each, the same six, in 30 rounds on a fifth of digits' training images
# held out (one seed; it is the best for both). On MNIST steps on y are shorter as its ℓ is larger, 21 against 8.
CUTTING: Fields = {
    "iterations": 20,
    "client_lr": xyv(0.3, 0.3, 0.1),
    "server_lr": xyv(0.05, 0.05, 0.2),
    "estimate": {"steps": 5, "lr": 0.1},
    "batch_size": None,
}
CUTTING_MNIST = merged(
    CUTTING,
    {
        "client_lr": xyv(0.1, 0.1, 0.1),
        "server_lr": xyv(0.02, 0.02, 0.2),
        "estimate": {"lr": 0.04},
        "batch_size": 256,
    },
)

DIGITS: dict[str, Fields] = {
    **each(SINGLE_LOOP, SIMFBO),
    **each(HESSIAN_INVERTING, {**inner(lr=0.3), "outer_lr": 0.3, **neumann(step=0.05)}),
    "afbo": {**inner(client_lr=0.05, lr=0.3), "outer_lr": 0.3, **neumann(step=0.05)},
    "adbo": {**CUTTING, "wait_for": 10, "max_staleness": 15},  # of 20 clients
    "sdbo": CUTTING,
    "aggitd": {**inner(lr=0.1), "outer_lr": 0.3},
    "fedbio": {"client_lr": xyv(0.1, 0.1, 0.1)},
    "fedbioacc": {"client_lr": xyv(0.1, 0.1, 0.1), "forgetting": 0.5},
}
MNIST: dict[str, Fields] = {
    **each(SINGLE_LOOP, {**SIMFBO, "server_lr": xyv(0.2, 0.2, 0.2)}),
    **each(HESSIAN_INVERTING, {**inner(lr=0.25), "outer_lr": 0.1, **neumann(step=0.02)}),
    "afbo": {**inner(client_lr=0.02, lr=0.25), "outer_lr": 0.1, **neumann(step=0.02)},
    "adbo": {**CUTTING_MNIST, "wait_for": 50, "max_staleness": 15},  # of 100 clients
    "sdbo": CUTTING_MNIST,
    "aggitd": {**inner(lr=0.03), "outer_lr": 0.1},
    "fedbio": {"client_lr": xyv(0.02, 0.02, 0.02)},
    "fedbioacc": {"client_lr": xyv(0.02, 0.02, 0.02), "forgetting": 0.5},
}
CIFAR: dict[str, Fields] = {
    **each(SINGLE_LOOP, {"client_lr": xyv(0.05, 0.05, 0.05), "server_lr": xyv(0.1, 0.1, 0.1), "radius": 10.0}),
    # at the start 2/ℓ is 0.09, of a client alone 0.08; the default of 0.1 is refused, nothing else was tried
    **each((*HESSIAN_INVERTING, "afbo"), neumann(step=0.02)),
    # seen to start and to learn in its first rounds, on held-out images; other sizes were not tried
    "aggitd": {**inner(lr=0.02), "outer_lr": 0.05},
}

NETWORKS_RUN = {"rounds": 300, "cohort": 10, "eval_every": 10}
NARROW = {
    "cnn": {"hidden": [8, 16, 32]},
    "conv4": {"hidden": [16]},
    "resnet12": {"hidden": [8, 16, 32, 64]},
    "resnet18": {"hidden": [8, 16, 32, 64]},
}

TUNING_NESTED: Fields = {**inner(rounds=3, lr=1.0), "outer_lr": 1.0, **neumann(terms=3, step=0.05)}
TUNING: dict[str, Fields] = {
    **each(HESSIAN_INVERTING, TUNING_NESTED),
    "aggitd": {**inner(rounds=10, lr=0.3), "outer_lr": 1.0},
    **each(SINGLE_LOOP, {"client_lr": xyv(0.05, 0.05, 0.02), "server_lr": xyv(0.1, 0.1, 0.02), "radius": 10.0}),
    **each(FEDBIO, {"client_lr": xyv(0.05, 0.05, 0.01)}),
}

FAIR: dict[str, Fields] = {
    "fedavg-s": {"inner_lr": 1.0, "outer_lr": 0.3},
    **each(HESSIAN_INVERTING, {**inner(lr=5.0), "outer_lr": 0.3}),
    **each(SINGLE_LOOP, {"client_lr": xyv(0.1, 1.0, 1.0), "server_lr": xyv(0.1, 1.0, 1.0)}),
}

CLASSIFICATION_RUN = {"rounds": 200, "cohort": 10, "eval_every": 10}
CLASSIFICATION_STEPS = {**local_steps(5), "batch_size": 32}
# A client's step moves the heads of its own tasks alone, and the server's mean over M = 10 clients takes a tenth of
# that: hence the factors of ten in server steps of y and v, and in the Neumann steps of hypergradients that are global.
# Under capacities what few hold goes beyond the client's own step (of those from 1 to 1/16, by up to five times); on
# Omniglot that did better than the bound of twice the mean: 67.6 against 64.4 % (one seed).
# A task's inner Hessian is at most ½·(16 + 1) = 8.5, of 16 features of mean square below 1 and a bias: with more
# features steps on y and Neumann steps must be shorter. In a batch of five tasks it counts for a fifth, or more where
# one is drawn again.
FEW_SHOT_NESTED = {**inner(lr=12.0, server_lr=10.0), "outer_lr": 0.5, **neumann(terms=10, step=0.6)}
FEW_SHOT_STEPS = {"local_steps": 2, "client_lr": xyv(0.6, 0.6, 0.6), "server_lr": xyv(0.5, 10.0, 10.0), "radius": 10.0}
FEW_SHOT: dict[str, Fields] = {
    **each(SINGLE_LOOP, FEW_SHOT_STEPS),
    **each(HESSIAN_INVERTING, merged(FEW_SHOT_NESTED, neumann(step=6.0))),
    **each(OWN_HYPERGRADIENTS, merged(FEW_SHOT_NESTED, {"hypergradient": {"paired": True}})),
    "fedavg": {"local_steps": 5, "lr": 0.1, "batch_size": 2},
}


PRESETS: dict[tuple[str, str | None], Preset] = {
    ("quadratic", None): Preset(
        shared={**local_steps(5), "batch_size": None},
        algorithms=QUADRATIC,
        run={"rounds": 500, "cohort": None, "eval_every": 10},
    ),
    ("saddle", None): Preset(shared={**local_steps(5), "batch_size": None}, algorithms=SADDLE, run=CLOSED_FORM_RUN),
    ("compositional", None): AFFINE,
    ("portfolio", None): AFFINE,
    ("location", None): Preset(
        shared={"regularization": 0.03},
        algorithms={"fism": {"lr": 1.0}, "irig": {"lr": 0.3}, "irg": {"lr": 10.0}, "bi-fista": {"lr": 0.1}},
        run={"rounds": 1000, "cohort": None, "eval_every": 20},
    ),
    ("selection", None): Preset(
        shared={"regularization": 0.05},
        algorithms={"fism": {"lr": 0.3}, "irig": {"lr": 0.1}, "irg": {"lr": 10.0}, "bi-fista": {"lr": 0.3}},
        run={"rounds": 300, "cohort": None, "eval_every": 10},
    ),
    ("selection", "mnist"): Preset(
        shared={"regularization": 5e-4, "regularization_decay": 0.2},
        algorithms={
            "fism": {"lr": 0.1, "lr_decay": 0.75},
            "irig": {"lr": 0.03},
            "irg": {"lr": 1.0},
            "bi-fista": {"lr": 0.1},
        },
        run=SELECTION_RUN,
    ),
    ("selection", "a9a"): Preset(
        shared={"regularization": 0.001},
        algorithms={"fism": {"lr": 0.03}, "irig": {"lr": 0.01}, "irg": {"lr": 10.0}, "bi-fista": {"lr": 0.3}},
        run=SELECTION_RUN,
    ),
    ("hospitals", None): Preset(
        shared={**local_steps(5), "batch_size": None},
        algorithms=HOSPITALS,
        run={"rounds": 300, "cohort": None, "eval_every": 30},
    ),
    ("regularization", None): linear(REGULARIZATION, PENALTIES_RUN),
    ("regularization", "covtype"): linear(COVERTYPE, PENALTIES_RUN),
    ("hyper_cleaning", None): linear(CLEANING_ON_DIGITS),
    ("hyper_cleaning", "mnist"): Preset(
        task={"validation": 0.2},
        shared={**local_steps(10), "batch_size": 64, **TERMS},
        algorithms=randomly(CLEANING_ON_MNIST),
        asynchronous=HALF,
        run=LINEAR_RUN,
    ),
    ("hyper_representation", "digits"): Preset(
        task={"clients": 20, "hidden": [64]},
        shared={**local_steps(5), "batch_size": 32, **TERMS},
        algorithms=randomly(DIGITS),
        run=NETWORKS_RUN,
        networks=NARROW,
    ),
    ("hyper_representation", "mnist"): Preset(
        task={"clients": 100, "hidden": [200]},
        shared={**local_steps(10), "batch_size": 64, **TERMS},
        algorithms=randomly(MNIST),
        run=NETWORKS_RUN,
        networks=NARROW,
    ),
    ("hyper_representation", "cifar-10"): Preset(
        task={"network": "cnn", "hidden": [16, 32, 64], "clients": 100},
        shared={**local_steps(5), "batch_size": 32, **TERMS},
        algorithms=CIFAR,
        run=NETWORKS_RUN,
        networks={
            "mlp": {"hidden": [200]},
            "conv4": {"hidden": [64]},
            "resnet12": {"hidden": [64, 160, 320, 640]},
            "resnet18": {"hidden": [64, 128, 256, 512]},
        },
    ),
    ("loss_tuning", None): Preset(
        shared={**local_steps(10), "batch_size": 16},
        algorithms=TUNING,
        run={"rounds": 100, "cohort": 10, "eval_every": 5},
        networks=NARROW,
    ),
    ("loss_tuning", "mnist"): Preset(
        task={"ratio": 0.01, "hidden": [200, 100], "clients": 100},
        shared={**local_steps(20), "batch_size": 50},
        algorithms={**TUNING, **each(HESSIAN_INVERTING, merged(TUNING_NESTED, inner(lr=2.0)))},
        run={"rounds": 120, "cohort": 10, "eval_every": 10},
    ),
    ("classification", None): Preset(
        shared=CLASSIFICATION_STEPS,
        algorithms={"fedlin": {"outer_lr": 0.6}, "fedavg": {"lr": 0.12}},
        run=CLASSIFICATION_RUN,
    ),
    ("fair_classification", None): Preset(
        shared={**CLASSIFICATION_STEPS, **TERMS}, algorithms=FAIR, run=CLASSIFICATION_RUN
    ),
    ("few_shot", None): Preset(
        task={"hidden": [16]},
        shared={**local_steps(20), "batch_size": 5},
        algorithms=randomly(FEW_SHOT),
        run={"rounds": 100, "eval_every": 10},
        networks={name: {"hidden": [16, 16, 16, 16]} for name in ("resnet12", "resnet18")},
    ),
}
"""Every preset by (task, data set); None stands for every data set without one of its own."""

METHODS = {"classification": "fedavg", "location": "fism", "selection": "fism"}
"""The method where none is named, for tasks that the default one is not for."""


def preset(task: str, data: str | None) -> Preset:
    """The values for a task and a data set; those without an entry have none."""
    data = "mnist" if data == "fashion-mnist" else data  # which has images of the same number and size
    return PRESETS.get((task, data), PRESETS.get((task, None), Preset()))
