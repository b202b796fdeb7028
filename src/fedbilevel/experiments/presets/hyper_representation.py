"""Step sizes and sizes for hyper_representation, by data set."""

from fedbilevel.experiments.presets.table import Fields, Preset, xyv

DIGITS: dict[str, Fields] = {
    "simfbo": {"client_lr": xyv(0.1, 0.1, 0.1), "server_lr": xyv(0.1, 0.1, 0.1), "radius": 10.0},
    "shrofbo": {"client_lr": xyv(0.1, 0.1, 0.1), "server_lr": xyv(0.1, 0.1, 0.1), "radius": 10.0},
}
MNIST: dict[str, Fields] = {
    "simfbo": {"client_lr": xyv(0.1, 0.1, 0.1), "server_lr": xyv(0.2, 0.2, 0.2), "radius": 10.0},
    "shrofbo": {"client_lr": xyv(0.1, 0.1, 0.1), "server_lr": xyv(0.2, 0.2, 0.2), "radius": 10.0},
}
CIFAR: dict[str, Fields] = {
    "simfbo": {"client_lr": xyv(0.05, 0.05, 0.05), "server_lr": xyv(0.1, 0.1, 0.1), "radius": 10.0},
    "shrofbo": {"client_lr": xyv(0.05, 0.05, 0.05), "server_lr": xyv(0.1, 0.1, 0.1), "radius": 10.0},
}

RUN = {"rounds": 300, "cohort": 10, "eval_every": 10}
SMALL_CNN = {"cnn": {"hidden": [8, 16, 32]}}
LIKE_MNIST = Preset(
    task={"clients": 100, "hidden": [200]},
    shared={"local_steps": 10, "batch_size": 64},
    algorithms=MNIST,
    run=RUN,
    networks=SMALL_CNN,
)

PRESETS: dict[str | None, Preset] = {
    "digits": Preset(
        task={"clients": 20, "hidden": [64]},
        shared={"local_steps": 5, "batch_size": 32},
        algorithms=DIGITS,
        run=RUN,
        networks=SMALL_CNN,
    ),
    "mnist": LIKE_MNIST,
    "fashion-mnist": LIKE_MNIST,
    "cifar-10": Preset(
        task={"network": "cnn", "hidden": [16, 32, 64], "clients": 100},
        shared={"local_steps": 5, "batch_size": 32},
        algorithms=CIFAR,
        run=RUN,
        networks={"mlp": {"hidden": [200]}},
    ),
}
