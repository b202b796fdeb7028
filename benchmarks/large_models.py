"""The memory and the time of a network whose blocks compute in bfloat16, or are recomputed for derivatives.

The network has residual blocks, which are x, and a head, which is y. The benchmark measures what a client of SimFBO
computes in a local step: ∇y G, and both derivatives of ⟨∇y G, v⟩. Memory is the size that XLA plans for temporary
arrays.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.harness import head, row

FEATURES, CLASSES = 64, 10
WAYS = {
    "float32": (jnp.float32, False),
    "float32, jax.checkpoint": (jnp.float32, True),
    "bfloat16": (jnp.bfloat16, False),
    "bfloat16, jax.checkpoint": (jnp.bfloat16, True),
}
QUICK = {"samples": 64, "width": 64, "blocks": 2}


def derivatives(dtype, again):
    """Return the function (x, y, v, batch) -> (derivatives of ⟨∇y G, v⟩ in x and y, ∇y G).

    If `again` is True, the blocks are computed again for the derivatives.
    """

    def block(h, weights):
        narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), weights)
        return h + jax.nn.gelu(h @ narrow["wide"]) @ narrow["back"], None

    def inner(x, y, batch):
        h = batch["u"].astype(dtype) @ x["first"].astype(dtype)
        h, _ = jax.lax.scan(jax.checkpoint(block) if again else block, h, x["blocks"])
        logits = h.astype(jnp.float32) @ y
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return entropy + 0.01 * jnp.sum(y**2)

    def along(x, y, v, batch):
        slope = jax.grad(inner, argnums=1)(x, y, batch)
        return jnp.sum(slope * v), slope

    return jax.grad(along, argnums=(0, 1), has_aux=True)


def main(samples: int = 2048, width: int = 256, blocks: int = 12) -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    stacked = {"wide": normal(blocks, width, 4 * width), "back": normal(blocks, 4 * width, width) / blocks}
    x, y, v = {"first": normal(FEATURES, width), "blocks": stacked}, normal(width, CLASSES), normal(width, CLASSES)
    u = rng.normal(size=(samples, FEATURES)).astype(np.float32)
    batch = {"u": u, "label": np.abs(u[:, :CLASSES]).argmax(1).astype(np.int32)}
    exact = None
    head("blocks in", "temporary arrays, MB", "seconds of the CPU", "error of the derivative in x")
    for way, (dtype, again) in WAYS.items():
        compiled = jax.jit(derivatives(dtype, again)).lower(x, y, v, batch).compile()
        jax.block_until_ready(compiled(x, y, v, batch))
        began = time.process_time()
        (in_x, _), _ = jax.block_until_ready(compiled(x, y, v, batch))
        elapsed = time.process_time() - began
        exact = in_x if exact is None else exact
        error = optax.tree.norm(optax.tree.sub(in_x, exact)) / optax.tree.norm(exact)
        row(way, f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}", f"{elapsed:.2f}", f"{error:.1e}")
