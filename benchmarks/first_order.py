"""The memory and the time of a round of F2SA and of SimFBO, with a whole network as y.

x contains a weight of the loss for each class. Samples are random, since only costs are measured. The last network is a
transformer whose attention has no second derivatives (transformer.py), so SimFBO refuses it. Each measurement is a
process of its own, and methods are measured in turn. For each network and method, the table has medians over the
passes:

temporary  what XLA plans for temporary arrays of one compiled round, MB; it is the same in every pass
peak       the peak memory of the process, MB, everything that it imports included; on a GPU, of the device
processor  processor seconds of a round, without the first two
"""

from functools import partial
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedbilevel as fb
from benchmarks import transformer
from benchmarks.harness import head, in_process, medians, row, turns
from benchmarks.machine import peak_mb
from fedbilevel.engines.engine import first_carry
from fedbilevel.tasks import networks

SIDE, CLASSES, RIDGE = 28, 10, 1e-3
CLIENTS, SAMPLES, BATCH, LOCAL_STEPS = 2, 128, 16, 5
WIDTH, HEADS, LAYERS = 32, 2, 2
IN_BLOCKS = "transformer, attention in blocks"
NETWORKS = ("mlp", "cnn", "transformer", IN_BLOCKS)
METHODS = ("SimFBO", "F2SA")
QUICK = {"passes": 1, "kinds": ["mlp"]}


def network(name: str) -> tuple[Any, Any]:
    """Return the start of y, and the function (y, images) -> logits."""
    key = jax.random.key(0)
    if "transformer" in name:
        attention = transformer.in_blocks if name == IN_BLOCKS else transformer.plain
        y = transformer.start(key, SIDE, WIDTH, LAYERS, CLASSES)
        return y, partial(transformer.logits, attention=attention, heads=HEADS)
    shape, hidden = ((SIDE, SIDE, 1), (16, 32, 128)) if name == "cnn" else ((SIDE * SIDE,), (512, 512, 512))
    made = getattr(networks, name)(shape, hidden, CLASSES)
    return made.init(key), lambda y, images: made.logits(*y, images.reshape(len(images), *shape))


def problem(name: str) -> tuple[fb.Bilevel, Any]:
    """Return the problem, and the start of y."""
    y0, logits = network(name)

    def losses(y: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits(y, batch["image"]), batch["label"])

    def inner(x: Any, y: Any, batch: Any) -> Any:
        return jnp.mean(jnp.exp(x[batch["label"]]) * losses(y, batch)) + RIDGE * optax.tree.norm(y, squared=True)

    return fb.Bilevel(lambda x, y, batch: jnp.mean(losses(y, batch)), inner), y0


def measure(name: str, method: str, rounds: int) -> dict[str, float]:
    """Measure one method on one network, in this process."""
    rng = np.random.default_rng(0)
    image = rng.standard_normal((CLIENTS, SAMPLES, SIDE, SIDE), np.float32)
    samples = {"image": image, "label": rng.integers(CLASSES, size=image.shape[:2], dtype=np.int32)}
    (posed, y0), clients, x0 = problem(name), fb.Clients(samples, dict(samples)), jnp.zeros(CLASSES)
    algorithm = getattr(fb, method)(local_steps=LOCAL_STEPS, batch_size=BATCH, client_lr=1e-3, server_lr=1e-3)
    carry = first_carry(algorithm, posed, clients, x0, y0)
    run = fb.Local(devices=1).start(algorithm, posed, clients, CLIENTS, jax.random.key(1), carry)
    for _ in range(2):  # not timed
        carry, *_ = run.advance(carry, 1)
    began = process_time()
    jax.block_until_ready(run.advance(carry, rounds)[0].state)
    processor = (process_time() - began) / rounds
    temporary = run.program.compiled.memory_analysis().temp_size_in_bytes / 1e6
    run.close()
    return {"temporary": temporary, "peak": peak_mb(), "processor": processor}


def main(kinds: tuple[str, ...] = NETWORKS, passes: int = 5, rounds: int = 3) -> None:
    head("y", "method", "temporary", "peak", "processor")
    for name in kinds:
        methods = METHODS[1:] if name == IN_BLOCKS else METHODS
        found = turns({method: partial(in_process, measure, name, method, rounds) for method in methods}, passes)
        for method, runs in found.items():
            m = medians(runs)
            row(name, method, f"{m['temporary']:.1f}", f"{m['peak']:.0f}", f"{m['processor']:.3f}")
