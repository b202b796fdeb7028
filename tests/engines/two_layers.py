"""A network of two layers, from whose hidden units submodels are cut: x is the first layer, and y the second."""

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb

HIDDEN, OUTPUTS = 8, 2
STRUCTURE = fb.Structure(x={"weight": "_ hidden", "bias": "hidden"}, y={"weight": "hidden _"})


def outer(x, y, batch):
    hidden = jnp.tanh(batch["input"] @ x["weight"] + x["bias"])
    return jnp.mean((hidden @ y["weight"] - batch["target"]) ** 2)


def inner(x, y, batch):
    return outer(x, y, batch) + 0.1 * jnp.sum(y["weight"] ** 2)


PROBLEM = fb.Bilevel(outer, inner, structure=STRUCTURE)


def start(inputs):
    rng = np.random.default_rng(1)
    x = {"weight": jnp.asarray(rng.normal(size=(inputs, HIDDEN))), "bias": jnp.asarray(rng.normal(size=HIDDEN))}
    return x, {"weight": jnp.asarray(rng.normal(size=(HIDDEN, OUTPUTS)))}
