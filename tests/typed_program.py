"""A user's program with types, in which a type checker refuses the lines that are marked so, and no others.

A field of a method may accept more types than its value has: a number for three step sizes, or a schedule for a number.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax

import fedbilevel as fb
from fedbilevel.authoring import XYV


def halved(round: int) -> float:
    return 0.1 / (1 + round)


def of_both(round: int, inner: int) -> float:
    return 0.1 / (1 + round + inner)


METHODS = [
    fb.SimFBO(),
    fb.SimFBO(client_lr=0.1, server_lr=1, local_steps=3),
    fb.SimFBO(client_lr=np.float64(0.1), server_lr=jnp.asarray(0.1)),
    fb.SimFBO(client_lr=halved, server_lr=optax.linear_schedule(0.1, 0.01, 100), radius=halved),
    fb.SimFBO(client_lr=fb.XYV(0.1, None, halved), server_lr={"x": 0.1, "y": 0.2, "v": 0.3}),
    fb.ShroFBO(client_lr=0.1, server_lr=None),
    fb.FedBiO(client_lr=halved),
    fb.FedNest(outer_lr=0.1, inner=fb.parts.SVRG(lr=halved)),
    fb.FedNest(outer_lr=None),
    fb.AFBO(outer_lr=halved, inner=fb.parts.MeanGradient(lr=of_both, rounds=2)),
    fb.AFBO(inner=fb.parts.MeanGradient(lr=[0.1, halved], rounds=2)),
    fb.FedAvg(lr=0.1),
]
CHANGED = dataclasses.replace(fb.SimFBO(server_lr=0.1), client_lr=0.2)


def step_of_x(method: fb.SimFBO) -> XYV:
    """Compute with fields, whose declared types are those of their values, also if they are inherited."""
    short: float = fb.FedAvg().lr / 2
    return fb.XYV(method.server_lr.x * short, method.client_lr.y, method.radius + 1.0)


WRONG = [
    fb.SimFBO(client_lr="fast"),  # refused
    fb.SimFBO(radius=None),  # refused
    fb.SimFBO(local_steps=0.5),  # refused
    fb.SimFBO(client_rl=0.1),  # refused
    fb.FedNest(outer_lr=[0.1, 0.2]),  # refused
    fb.FedAvg(lr={"x": 0.1}),  # refused
]
