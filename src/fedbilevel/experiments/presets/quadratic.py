"""Step sizes for the quadratic. With full batches, where a method ends is off by a multiple of its clients' steps."""

from fedbilevel.experiments.presets.table import Fields, Preset, xyv

ALGORITHMS: dict[str, Fields] = {
    "simfbo": {"client_lr": xyv(1e-4, 1e-3, 1e-3), "server_lr": xyv(0.01, 0.1, 0.1)},
    "shrofbo": {"client_lr": xyv(1e-4, 1e-3, 1e-3), "server_lr": xyv(0.01, 0.1, 0.1)},
}

PRESETS: dict[str | None, Preset] = {
    None: Preset(
        shared={"local_steps": 5, "batch_size": None},
        algorithms=ALGORITHMS,
        run={"rounds": 500, "cohort": None, "eval_every": 10},
    )
}
