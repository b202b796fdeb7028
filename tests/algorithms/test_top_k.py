"""Compressed replies of clients that differ: the limit, with a memory and without; the bytes; agreement of engines."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.layers import Layer, layered
from fedbilevel.algorithms.parts.top_k import Scatter, TopK
from fedbilevel.core.tree import XYV

RNG = np.random.default_rng(0)
CLIENTS, DIM = 5, 6
WEIGHTS = np.array([0.3, 0.25, 0.2, 0.15, 0.1])
CURVES = RNG.uniform(0.5, 1.5, (CLIENTS, DIM))  # ∇²yy g_i is diagonal, and each client has another one
CENTERS, TARGETS = RNG.normal(size=(2, CLIENTS, DIM))
SHAPE = fb.SimFBO(local_steps=1, batch_size=None, server_lr=XYV(0.025, 0.05, 0.05), client_lr=0.1)


def problem():
    """Return g_i = ½‖y − x − c_i‖² in the norm of H_i, and f_i = ½‖y − t_i‖² + ‖x‖²/20."""
    return fb.Bilevel(
        lambda x, y, batch: jnp.mean(jnp.sum((y - batch["target"]) ** 2, 1)) / 2 + jnp.sum(x**2) / 20,
        lambda x, y, batch: jnp.mean(jnp.sum(batch["curve"] * (y - x - batch["center"]) ** 2, 1)) / 2,
    )


def population():
    outer = [{"target": row[None]} for row in TARGETS]
    inner = [{"curve": h[None], "center": c[None]} for h, c in zip(CURVES, CENTERS, strict=True)]
    return fb.Clients(outer, inner, weights=WEIGHTS)


def best():
    """Return x*: y*(x) = x + b with b = H̄⁻¹ Σ p H c, so that Φ = ½‖x + b − t̄‖² + ‖x‖²/20."""
    curve = WEIGHTS @ CURVES
    return (WEIGHTS @ TARGETS - (WEIGHTS @ (CURVES * CENTERS)) / curve) / 1.1


def run(method, rounds=4000, **options):
    return fb.solve(method, problem(), population(), jnp.zeros(DIM), jnp.zeros(DIM), rounds=rounds, **options)


class Forgetful(Layer):
    """Send the largest entries of a reply, and forget the others."""

    kind, place = "forgetful", "coded"

    def reply(self, asked, kept, client, run):
        reply = run(asked, client)
        return reply._replace(update=TopK(share=0.2).coded(reply.update)), kept


@pytest.mark.parametrize(("layer", "low", "high"), [(TopK(share=0.2), 0, 1e-12), (Forgetful(), 1e-2, np.inf)])
def test_with_the_memory_the_limit_is_exact_and_without_it_it_is_not(layer, low, high):
    assert low <= np.linalg.norm(run(layered(SHAPE, layer)).x - best()) < high


@pytest.mark.slow
def test_late_and_short_replies_share_a_memory():
    """With a fifth of the entries, and the first two of five replies, the limit is still exact."""
    clock = fb.Clock(compute=[0.1, 0.2, 0.3, 0.5, 0.8], network=0.0)
    slower = dataclasses.replace(SHAPE, server_lr=XYV(0.005, 0.02, 0.02))
    method = layered(fb.Asynchronous(slower, wait_for=2, delay_penalty=0.0), TopK(share=0.2))
    result = run(method, rounds=20_000, engine=fb.Local(clock=clock))
    assert result.history["delay"][-1] > 0.5
    np.testing.assert_allclose(result.x, best(), atol=1e-9)
    some = [run(method, rounds=5, engine=engine(clock=clock)) for engine in (fb.Reference, fb.Local)]
    np.testing.assert_allclose(some[0].x, some[1].x, atol=1e-13)
    assert some[0].ledger == some[1].ledger


@pytest.mark.slow
def test_cohorts_of_some_come_to_the_same_limit():
    """With cohorts of three the limit is the same: clients that are not asked, and the server, keep their g_i."""
    result = run(layered(SHAPE, TopK(share=0.3)), rounds=4000, cohort=3, key=2)
    np.testing.assert_allclose(result.x, best(), atol=1e-11)


@pytest.mark.slow
def test_all_entries_are_the_method_itself_and_engines_agree():
    whole = run(SHAPE, rounds=5).x
    np.testing.assert_allclose(run(layered(SHAPE, TopK(share=1.0)), rounds=5).x, whole, atol=1e-13)
    some = [run(layered(SHAPE, TopK(share=0.2)), rounds=5, engine=engine).x for engine in (fb.Reference(), fb.Local())]
    np.testing.assert_allclose(*some, atol=1e-13)


@pytest.mark.parametrize("engine", [fb.Reference(), fb.Local()])
def test_the_ledger_counts_what_is_sent(engine):
    """A reply has 4 of 18 entries in 8 bytes each, their places in 4 bytes each, and two numbers.

    The two numbers say whether the client is new, and what its delay is.
    """
    ledger = run(layered(SHAPE, TopK(share=0.2)), rounds=2, engine=engine).ledger
    assert ledger.bytes_up == 2 * CLIENTS * (4 * (8 + 4) + 2 * 8)
    assert ledger.bytes_down == 2 * CLIENTS * (3 * DIM * 8 + 4)


@pytest.mark.parametrize(
    ("share", "size", "sent"), [(0.07, 100, 7), (0.071, 100, 8), (1e-9, 100, 1), (1.0, 3, 3), (0.5, 0, 0), (0.1, 15, 2)]
)
def test_the_share_of_the_entries_is_rounded_up(share, size, sent):
    """Rounding errors add no entry: in floating point, 0.07 times 100 is a little more than 7."""
    assert fb.parts.TopK(share=share).coded(jnp.ones(size)).wire[0].shape == (sent,)


def test_places_that_are_none_are_left_out():
    """Places that do not exist are left out; the site of a federation can send any numbers."""
    whole = Scatter(lambda vector: vector, 4)((jnp.asarray([1.0, 2.0, 3.0, 4.0]), jnp.asarray([-1, 0, 4, 10**9])))
    np.testing.assert_array_equal(whole, [2, 0, 0, 0])
