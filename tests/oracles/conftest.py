"""Provide a bilevel problem that is not quadratic, with trees of several shapes.

It has no symmetries that could hide mistakes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.problem import Bilevel
from fedbilevel.core.tree import XYV


class Instance(NamedTuple):
    problem: Bilevel
    iterate: XYV
    batches: list[Any]  # five independent batches


def inner(x, y, batch):
    hidden = jnp.tanh(batch["u"] @ x["a"] + x["b"]) @ y["w"]  # (n, 3)
    score = jnp.sin(hidden) @ y["k"] + y["c"]
    return jnp.mean(jax.nn.softplus(score * batch["t"])) + 0.1 * jnp.sum(jnp.cosh(y["w"] * x["b"][:, None]))


def outer(x, y, batch):
    score = jnp.tanh(batch["u"] @ x["a"]) @ (y["w"] @ y["k"])
    return jnp.mean(jnp.log1p((score - batch["t"]) ** 2)) * jnp.exp(y["c"] * x["b"][0])


@pytest.fixture(scope="session")
def instance() -> Instance:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    x = {"a": normal(4, 2), "b": normal(2)}
    y, v = ({"w": normal(2, 3), "k": normal(3), "c": normal()} for _ in range(2))
    batches = [{"u": normal(6, 4), "t": normal(6)} for _ in range(5)]
    return Instance(Bilevel(outer=outer, inner=inner), XYV(x, y, v), batches)
