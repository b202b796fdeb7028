"""AFBO: anarchic federated bilevel optimization; clients answer at their own pace, with as much work as they like.

Anonymous. "Anarchic Federated Bilevel Optimization". Manuscript under double-blind review; a version of it appeared at
WiOpt 2024. Algorithms 1 and 2.

A round is K inner exchanges and an outer one, each of which ends with the first replies to arrive:
`Asynchronous(AFBO(…), wait_for=n)`; AFBO alone waits for everyone's. Client i, at the (x, y) that it was last sent,
makes E_i local steps, and then, asked for it, estimates the hypergradient:

    inner   y_{e+1} = y_e − η G_e,   G_e = ∇y g_i(x, y_e; ξ_e)         G_i = (1/E_i) Σ_e G_e
            y ← y − β_k mean_i G_i                                                                K exchanges
    outer   H_i = ∇x f_i(x, y) − ∇²xy g_i(x, y) N_i s (I − s∇²yy g_i)^N' ∇y f_i,   N' uniform on {0..N_i−1}   (APHE)
            x ← x − α mean_i H_i                                                                  one exchange

mean_i: of everyone's last replies, whenever these were asked for, Σ p_i (.) / Σ p_i over those who have ever replied.
The delays ρ and τ, mean numbers of exchanges since then, are reported as `delay.inner_gradients` and
`delay.outer_hypergradient` ("global": `delay.outer_directions`).

The mean of H_i is not the hypergradient where clients differ, and so neither is the end. `hypergradient` = "global":

    outer   H_i = ∇x f_i − ∇²xy g_i v,   r_i = ∇²yy g_i v − ∇y f_i            (SimFBO's directions)
            x ← x − α mean_i H_i,   v ← v − γ mean_i r_i

Exchanges per round: K + 1. Down: x, y ("global", outer: and v). Up: y's shape, then x's ("global": and v's).
Client state: none; `Asynchronous`: its last reply to either.
Cost per local step: a gradient of g; per outer answer one of f and the products with the client's own ∇²g ("global":
two products, by the same pass).

Departures from the paper:
1. Algorithm 1 leaves out the local step y_{e+1} = y_e − η G_e, lets i run to N and takes y^{t+1} = y^{t,K−1}: here
   there are local steps, of their own size η, i runs to M, and y^{t+1} = y^{t,K}.
2. APHE starts from f_i where ∇y f_i is meant, and its product has N_i factors, always, times max_i N_i: it tends to 0
   as N_i grows. Here the length is random and the factor N_i, which makes its expectation the series
   s Σ_{n<N_i} (I − s∇²yy g_i)^n; this series is the default, and `inverse` = "random" the product. N_i is one number
   for all unless `neumann_terms` has several.
3. Server memory without a table: see asynchronous.py. Delays count from when a reply was asked for, not from its
   arrival.
4. Weights p_i for 1/M. Steps may be divided by 1 + c·delay (`delay_penalty` of `Asynchronous`), as the paper says that
   delays want smaller ones, and α and β apart.

Checked in tests/algorithms/test_afbo.py (closed forms, event by event with a table), test_asynchronous.py,
test_own_x.py and tests/engines/test_agreement.py.
"""

from typing import Any, Literal, NamedTuple

import jax
import optax
from jax import Array

from fedbilevel.algorithms import fednest
from fedbilevel.algorithms.fednest import Alternating
from fedbilevel.algorithms.parts.hypergradient import Quality
from fedbilevel.core.algorithm import phase
from fedbilevel.core.answers import Withheld
from fedbilevel.core.client import Client, Clients
from fedbilevel.core.config import positive, static
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import XYV, PyTree, move, scaled
from fedbilevel.oracles.products import directions


class State(NamedTuple):
    """What the server keeps."""

    nested: fednest.State
    v: PyTree  # of "global"

    @property
    def x(self) -> PyTree:
        return self.nested.x

    @property
    def y(self) -> PyTree:
        return self.nested.y

    @property
    def quality(self) -> Quality:
        return self.nested.quality


class AFBO(Alternating):
    """Inner rounds on y, then one step of x, by phases that bear being late: see `Asynchronous`.

    Args: those of `Alternating`, and
        inner_rounds: K.
        local_steps: E_i, where the population does not give each client its own.
        client_lr: η, a client's step.
        inner_lr, outer_lr: β, α, the server's steps.
        hypergradient: "local" (APHE, for which `inverse` and what belongs to it are) or "global", with a v.
        neumann_terms: N_i: one number for all, or one for each client.
        system_lr: γ, the server's step on v.
        fresh_cohorts, merged, inner_server_lr: have no part in this method.

    Needs: a bilevel problem; g strongly convex in y, g_i for every client where hypergradient = "local".
    Good for: clients of very different speed, whom nobody should wait for.
    """

    name = "afbo"

    hypergradient: Literal["global", "local"] = static(default="local")
    client_lr: float = positive(default=0.01)
    system_lr: float = positive(default=0.1)

    @property
    def asynchronous_phases(self) -> tuple[str, ...]:
        return "inner_gradients", "outer_hypergradient" if self.hypergradient == "local" else "outer_directions"

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> None:
        if self.hypergradient == "local":
            super().check_start(problem, clients, x, y)

    @property
    def own_x_lr(self) -> Any:
        return self.outer_lr

    def noise_objection(self) -> str:
        return ""  # "global" has no inverse

    @property
    def mergeable(self) -> bool:
        return False

    @property
    def extra_cohorts(self) -> int:
        return 0

    def init(self, x: PyTree, y: PyTree) -> Any:  # a State
        return State(super().init(x, y), optax.tree.zeros_like(y) if self.hypergradient == "global" else None)

    @phase(takes=("x", "y"), gives="y")
    def inner_gradients(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """G_i, the mean of the gradients along E_i local steps on y."""
        x, y = at
        gradient = self.inner_gradient_at(client, x, y)
        count = client.local_steps(self.local_steps)

        def step(e: Array, total: PyTree) -> PyTree:
            point = move(y, -self.client_lr, total)
            return optax.tree.add(total, gradient(point, jax.random.fold_in(key, e)))

        total = jax.lax.fori_loop(0, count, step, optax.tree.zeros_like(y))
        return Reply(jax.tree.map(lambda leaf: leaf / count, total), gradients=count)

    @phase(takes=("x", "y"), gives=("x", Withheld((NUMBER, NUMBER))))
    def outer_hypergradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """H_i of "local", and what the client's own products told (see `Quality.to_average`)."""
        return self.local_hypergradient(client, at, key)

    @phase(takes=XYV("x", "y", "y"), gives=("x", "y"))
    def outer_directions(self, client: Client, at: XYV, key: Array) -> Reply:
        """H_i and r_i of "global"."""
        outer_key, inner_key = jax.random.split(key)
        outer_batch = client.outer_batch(outer_key, self.batch_size)
        found = directions(client.problem, at, outer_batch, client.inner_batch(inner_key, self.batch_size))
        metrics = {"outer_loss": found.outer_loss}
        return Reply((found.step.x, found.step.v), metrics=metrics, gradients=1, hvps=2)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        x = state.x

        def inner(fed: Fed, y: PyTree, key: Array) -> PyTree:
            return move(y, -self.inner_lr, fed.mean(self.inner_gradients, (x, y), key, unbiased=True))

        y = fed.repeat(self.inner_rounds, inner, state.y, inner_key)
        quality, v = state.quality, state.v
        if self.hypergradient == "local":
            h, means = fed.mean(self.outer_hypergradient, (x, y), outer_key, unbiased=True)
            quality = Quality.of_clients(means)
        else:
            h, r = fed.mean(self.outer_directions, XYV(x, y, v), outer_key, unbiased=True)
            v = move(v, -self.system_lr, r)
        return State(self.moved(state.nested, scaled(-self.outer_lr, h), y, quality), v)
