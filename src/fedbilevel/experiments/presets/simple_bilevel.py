"""Step sizes for the simple bilevel problems, location and selection, by data set.

Those of location were found on its default, 40 overlapping balls, by the error of x, which that layout knows. There λ
is against 1/m: an F with kinks has its own minimisers for minimisers of F + λH once λ is some share of that.
In selection λ_k are the same for all methods, so that they chase the same points, the minimisers of F + λ_k H; steps
were chosen by F + λ_k H on the training rows in the last round. λ₁ of mnist and a9a was chosen on rows held out of
training.
"""

from fedbilevel.experiments.presets.table import ALONE, Fields, Preset

LOCATION: dict[str, Fields] = {
    "fism": {"lr": 1.0},
    "irig": {"lr": 0.3},
    "irg": {"lr": 10.0},
    "bi-fista": {"lr": 0.1},
}
DIGITS: dict[str, Fields] = {
    "fism": {"lr": 0.3},
    "irig": {"lr": 0.1},
    "irg": {"lr": 10.0},
    "bi-fista": {"lr": 0.3},
}
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
    algorithms={
        "fism": {"lr": 0.03},
        "irig": {"lr": 0.01},
        "irg": {"lr": 10.0},
        "bi-fista": {"lr": 0.3},
    },
    run=LIKE_MNIST.run,
    runs=ALONE,
)

PRESETS: dict[str, dict[str | None, Preset]] = {
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
            algorithms=DIGITS,
            run={"rounds": 300, "cohort": None, "eval_every": 10},
            runs=ALONE,
        ),
        "mnist": LIKE_MNIST,
        "fashion-mnist": LIKE_MNIST,
        "a9a": A9A,
    },
}
