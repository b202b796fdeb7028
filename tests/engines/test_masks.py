"""Places that only pad a cohort are masked, and nobody else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.tree import XY
from fedbilevel.machinery.kept import _KEPT


class Descent(authoring.Algorithm):
    """One exchange a round, and no division of its own."""

    def init(self, x, y):
        return XY(x, y)

    @authoring.phase
    def slope(self, client, at, key):
        return authoring.Reply(jax.grad(client.problem.outer)(*at, client.outer_batch(key, None)))

    def round(self, fed, state, key):
        return state._replace(x=state.x - fed.mean(self.slope, state, key, unbiased=True))


@pytest.mark.parametrize(("chunk", "masked"), [(None, False), (3, True)])
def test_only_where_places_are_empty_a_program_counts_who_is_there(chunk, masked):
    """How many replied is known where everyone does; four clients in chunks of three leave two places empty."""
    fb.Local.forget()
    rows = np.random.default_rng(0).normal(size=(4, 8, 3))
    problem = fb.Bilevel(lambda x, y, batch: jnp.sum(batch @ x), lambda x, y, batch: jnp.sum(batch @ y))
    start = jnp.ones(3), jnp.ones(3)
    result = fb.solve(Descent(), problem, fb.Clients(rows), *start, rounds=2, engine=fb.Local(chunk=chunk))
    np.testing.assert_allclose(result.x, 1 - 2 * rows.sum(1).mean(0), rtol=1e-12)
    programs = [one.as_text() for one in _KEPT.values() if hasattr(one, "as_text")]
    (rounds,) = [text for text in programs if "dynamic-update-slice(" in text]
    assert (" divide(" in rounds) is masked
