"""AFBO: anarchic federated bilevel optimization; clients answer at their own pace, with as much work as they like.

Anonymous. "Anarchic Federated Bilevel Optimization". Manuscript under double-blind review; a version of it appeared at
WiOpt 2024. Algorithms 1 and 2.

A round is K inner exchanges and an outer one, each of which ends with the first answers to arrive. Client i, at the
(x, y) that it was last sent, makes E_i local steps, and then, asked for it, estimates the hypergradient:

    inner   y_{e+1} = y_e − η G_e,   G_e = ∇y g_i(x, y_e; ξ_e)         G_i = (1/E_i) Σ_e G_e
            y ← y − β_k mean_i G_i                                                                K exchanges
    outer   H_i = ∇x f_i(x, y) − ∇²xy g_i(x, y) N_i s (I − s∇²yy g_i)^N' ∇y f_i,   N' uniform on {0..N_i−1}   (APHE)
            x ← x − α mean_i H_i                                                                  one exchange

mean_i: of everyone's last answers, whenever these were asked for, Σ p_i (.) / Σ p_i over those who have ever answered.
The delays ρ and τ, mean numbers of exchanges since then, are reported as `inner_delay` and `outer_delay`.

The mean of H_i is not the hypergradient where clients differ, and so neither is the end. `hypergradient` = "global":

    outer   H_i = ∇x f_i − ∇²xy g_i v,   r_i = ∇²yy g_i v − ∇y f_i            (SimFBO's directions)
            x ← x − α mean_i H_i,   v ← v − γ mean_i r_i

Exchanges per round: K + 1. Down: x, y ("global", outer: and v). Up: y's shape, then x's ("global": and v's).
Client state: with `first` the last answer of either kind, with `own_x` the client's block of x, in no message then.
Cost per local step: a gradient of g; per outer answer one of f and the products with the client's own ∇²g ("global":
two products, by the same pass).

Departures from the paper:
1. Algorithm 1 leaves out the local step y_{e+1} = y_e − η G_e, lets i run to N and takes y^{t+1} = y^{t,K−1}: here
   there are local steps, of their own size η, i runs to M, and y^{t+1} = y^{t,K}.
2. APHE starts from f_i where ∇y f_i is meant, and its product has N_i factors, always, times max_i N_i: it tends to 0
   as N_i grows. Here the length is random and the factor N_i, which makes its expectation the series
   s Σ_{n<N_i} (I − s∇²yy g_i)^n; this series is the default, and `inverse` = "random" the product. N_i is one number
   for all unless `neumann_terms` has several.
3. Server memory without a table: see memory.py. Delays count from when an answer was asked for, not from its arrival.
4. Weights p_i for 1/M. Steps may be divided by 1 + c·delay (`delay_penalty`), as the paper says that delays want
   smaller ones, and α and β apart.

Checked in tests/algorithms/test_afbo.py (closed forms, event by event with a table), test_memory.py, test_own_x.py and
tests/engines/test_agreement.py.
"""

from math import isfinite
from typing import Any, Literal, NamedTuple

import jax
import optax
from jax import Array

from fedbilevel.algorithms import fednest
from fedbilevel.algorithms.fednest import Alternating
from fedbilevel.algorithms.hypergradient import Quality
from fedbilevel.algorithms.memory import FirstAnswers, Memory
from fedbilevel.algorithms.own_x import check_own_x, own_block, stepped, together
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.answers import Kept
from fedbilevel.core.client import Client, Clients
from fedbilevel.core.config import positive, static
from fedbilevel.core.errors import require
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import XYV, PyTree, move, scaled
from fedbilevel.oracles.products import directions


class State(NamedTuple):
    """What the server keeps."""

    nested: fednest.State
    v: PyTree  # of "global"
    inner: Memory | None
    outer: Memory | None

    @property
    def x(self) -> PyTree:
        return self.nested.x

    @property
    def y(self) -> PyTree:
        return self.nested.y

    @property
    def quality(self) -> Quality:
        return self.nested.quality


class ClientState(NamedTuple):
    """What a client keeps, where it keeps anything."""

    x: PyTree  # its block, with `own_x`
    inner: Kept | None
    outer: Kept | None


class AFBO(FirstAnswers, Alternating, Algorithm):
    """Inner rounds on y, then one step of x, each going on with the first answers and everyone's last ones.

    Args: those of `FirstAnswers`, those of `Alternating`, and
        inner_rounds: K.
        local_steps: E_i, where the population does not give each client its own.
        client_lr: η, a client's step.
        inner_lr, outer_lr: β, α, the server's steps.
        hypergradient: "local" (APHE, for which `inverse` and what belongs to it are) or "global", with a v.
        neumann_terms: N_i: one number for all, or one for each client.
        system_lr: γ, the server's step on v.
        delay_penalty: c: the server's steps are divided by 1 + c·(mean delay of the kind of answer).
        own_x: x is split by client (see own_x.py): each keeps its block and makes the step p_i α H_i by itself, once
            for each of its outer answers.
        fresh_cohorts, merged, inner_server_lr: have no part in this method.

    Needs: a bilevel problem; g strongly convex in y, g_i for every client where hypergradient = "local".
    Good for: clients of very different speed, whom nobody should wait for.
    """

    name = "afbo"

    hypergradient: Literal["global", "local"] = static("local")
    client_lr: float = positive(0.01)
    system_lr: float = positive(0.1)
    delay_penalty: float = static(0.0)
    own_x: bool = static(False)

    def validate(self) -> None:
        super().validate()
        self.check_first()
        name, c = f"{type(self).__name__}.delay_penalty", self.delay_penalty
        number = isinstance(c, int | float) and not isinstance(c, bool) and isfinite(c) and c >= 0
        require(number, name, c, "a number, at least 0")
        alone = c == 0 or not self.own_x
        require(alone, name, c, "0 where own_x: clients who make the steps on x do not know the mean delay")

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> None:
        if self.own_x:
            check_own_x(f"{type(self).__name__}.own_x", clients, x)
        if self.hypergradient == "local":
            super().check_start(problem, clients, x, y)

    @property
    def keeps_own_x(self) -> bool:
        return self.own_x

    def noise_objection(self) -> str:
        return ""  # "global" has no inverse

    @property
    def mergeable(self) -> bool:
        return False

    @property
    def extra_cohorts(self) -> int:
        return 0

    def init(self, x: PyTree, y: PyTree) -> Any:  # a State
        v = optax.tree.zeros_like(y) if self.hypergradient == "global" else None
        return State(super().init(x, y), v, self.memory_of(y), self.memory_of(self.outer_answer(x, y)))

    def init_client(self, x: PyTree, y: PyTree) -> ClientState | None:
        if not self.own_x and not self.asynchronous:
            return None
        inner, outer = (Kept.nothing(like) if self.asynchronous else None for like in (y, self.outer_answer(x, y)))
        return ClientState(own_block(x) if self.own_x else None, inner, outer)

    def outer_answer(self, x: PyTree, y: PyTree) -> PyTree:
        """Of the shapes of the answer to an outer exchange."""
        return None if self.own_x else x, y if self.hypergradient == "global" else Quality.unknown().to_average()

    @phase
    def inner_gradients(self, client: Client, message: PyTree, key: Array) -> Reply:
        """G_i, the mean of the gradients along E_i local steps on y."""
        (x, y), number = self.opened(message)
        gradient = self.inner_gradient_at(client, self.x_of(client, x), y)
        count = client.local_steps(self.local_steps)

        def step(e: Array, total: PyTree) -> PyTree:
            point = move(y, -self.client_lr, total)
            return optax.tree.add(total, gradient(point, jax.random.fold_in(key, e)))

        total = jax.lax.fori_loop(0, count, step, optax.tree.zeros_like(y))
        reply = Reply(jax.tree.map(lambda leaf: leaf / count, total), gradients=count)
        if client.state is None:
            return reply
        reply, kept = self.closed(reply, client.state.inner, number)
        return reply._replace(state=client.state._replace(inner=kept))

    @phase
    def outer_directions(self, client: Client, message: PyTree, key: Array) -> Reply:
        """H_i, with "global" r_i; or else what the client's own products told (see `Quality.to_average`)."""
        (x, y, v), number = self.opened(message)
        x = self.x_of(client, x)
        if self.hypergradient == "local":
            reply = self.local_hypergradient(client, (x, y), key)
        else:
            reply = self.system_directions(client, XYV(x, y, v), key)
        if client.state is None:
            return reply
        block, (h, rest) = client.state.x, reply.update
        if self.own_x:
            block, h = stepped(block, self.outer_lr, client.weight, h), None
        reply, kept = self.closed(reply._replace(update=(h, rest)), client.state.outer, number)
        return reply._replace(state=client.state._replace(x=block, outer=kept))

    def system_directions(self, client: Client, at: XYV, key: Array) -> Reply:
        outer_key, inner_key = jax.random.split(key)
        outer_batch = client.outer_batch(outer_key, self.batch_size)
        found = directions(client.problem, at, outer_batch, client.inner_batch(inner_key, self.batch_size))
        metrics = {"outer_loss": found.outer_loss}
        return Reply((found.step.x, found.step.v), metrics=metrics, gradients=1, products=2)

    def x_of(self, client: Client, sent: PyTree) -> PyTree:
        return client.state.x if self.own_x else sent

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        x = None if self.own_x else state.x

        def inner(fed: Fed, at: tuple[PyTree, Memory | None], key: Array) -> tuple[PyTree, Memory | None]:
            y, memory = at
            g, memory = self.latest(fed, self.inner_gradients, (x, y), memory, key)
            return move(y, -self.aged(self.inner_lr, memory), g), memory

        y, inner_memory = fed.repeat(self.inner_rounds, inner, (state.y, state.inner), inner_key)
        (h, rest), memory = self.latest(fed, self.outer_directions, (x, y, state.v), state.outer, outer_key)
        change = optax.tree.zeros_like(state.x) if self.own_x else scaled(-self.aged(self.outer_lr, memory), h)
        quality, v = state.quality, state.v
        if self.hypergradient == "local":
            quality = Quality.of_clients(rest)
        else:
            v = move(v, -self.aged(self.system_lr, memory), rest)
        return State(self.moved(state.nested, change, y, quality), v, inner_memory, memory)

    def aged(self, lr: Any, memory: Memory | None) -> Any:
        """A step size, made smaller by the mean delay of the answers that the step goes by."""
        return lr if memory is None or self.delay_penalty == 0 else lr / (1 + self.delay_penalty * memory.delay)

    def columns(self, state: State) -> dict[str, Array]:
        if state.inner is None or state.outer is None:
            return {}
        return {"inner_delay": state.inner.delay, "outer_delay": state.outer.delay}

    def with_own(self, state: State, clients: PyTree) -> State:
        return state._replace(nested=state.nested._replace(x=together(clients.x))) if self.own_x else state
