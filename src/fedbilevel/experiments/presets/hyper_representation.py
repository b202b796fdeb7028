"""Step sizes and sizes for hyper_representation, by data set."""

from fedbilevel.experiments.presets.table import HESSIAN_INVERTING, SINGLE_LOOP, Fields, Preset, each, randomly, xyv

SIMFBO = {"client_lr": xyv(0.1, 0.1, 0.1), "server_lr": xyv(0.1, 0.1, 0.1), "radius": 10.0}

DIGITS: dict[str, Fields] = {
    **each(SINGLE_LOOP, SIMFBO),
    **each(HESSIAN_INVERTING, {"inner_lr": 0.3, "outer_lr": 0.3, "neumann_step": 0.05}),
    "aggitd": {"inner_lr": 0.1, "outer_lr": 0.3},
    "fedbio": {"client_lr": xyv(0.1, 0.1, 0.1)},
    "fedbioacc": {"client_lr": xyv(0.1, 0.1, 0.1), "forgetting": 0.5},
}
MNIST: dict[str, Fields] = {
    **each(SINGLE_LOOP, {**SIMFBO, "server_lr": xyv(0.2, 0.2, 0.2)}),
    **each(HESSIAN_INVERTING, {"inner_lr": 0.25, "outer_lr": 0.1, "neumann_step": 0.02}),
    "aggitd": {"inner_lr": 0.03, "outer_lr": 0.1},
    "fedbio": {"client_lr": xyv(0.02, 0.02, 0.02)},
    "fedbioacc": {"client_lr": xyv(0.02, 0.02, 0.02), "forgetting": 0.5},
}
CIFAR: dict[str, Fields] = {
    **each(
        SINGLE_LOOP,
        {"client_lr": xyv(0.05, 0.05, 0.05), "server_lr": xyv(0.1, 0.1, 0.1), "radius": 10.0},
    ),
    # seen to start and to learn in its first rounds, on held-out images; other sizes were not tried
    "aggitd": {"inner_lr": 0.02, "outer_lr": 0.05},
}

RUN = {"rounds": 300, "cohort": 10, "eval_every": 10}
NARROW = {
    "cnn": {"hidden": [8, 16, 32]},
    "conv4": {"hidden": [16]},
    "resnet12": {"hidden": [8, 16, 32, 64]},
    "resnet18": {"hidden": [8, 16, 32, 64]},
}
LIKE_MNIST = Preset(
    task={"clients": 100, "hidden": [200]},
    shared={"local_steps": 10, "batch_size": 64},
    algorithms=randomly(MNIST),
    run=RUN,
    networks=NARROW,
)

PRESETS: dict[str | None, Preset] = {
    "digits": Preset(
        task={"clients": 20, "hidden": [64]},
        shared={"local_steps": 5, "batch_size": 32},
        algorithms=randomly(DIGITS),
        run=RUN,
        networks=NARROW,
    ),
    "mnist": LIKE_MNIST,
    "fashion-mnist": LIKE_MNIST,
    "cifar-10": Preset(
        task={"network": "cnn", "hidden": [16, 32, 64], "clients": 100},
        shared={"local_steps": 5, "batch_size": 32},
        algorithms=CIFAR,
        run=RUN,
        networks={
            "mlp": {"hidden": [200]},
            "conv4": {"hidden": [64]},
            "resnet12": {"hidden": [64, 160, 320, 640]},
            "resnet18": {"hidden": [64, 128, 256, 512]},
        },
    ),
}
