"""AFBO: anarchic federated bilevel optimization, in which clients reply at any time, after any number of local steps.

Anonymous. "Anarchic Federated Bilevel Optimization". Manuscript under double-blind review; a version of it appeared at
WiOpt 2024. Algorithms 1 and 2.

An exchange is one message from the server to the clients, with their replies. A round has K inner exchanges and one
outer exchange. With `layered(AFBO(…), Asynchronous(wait_for=n))` each exchange ends with the first n replies. Without
this layer, AFBO waits for all clients. In an inner exchange client i makes E_i local steps, and in an outer exchange it
estimates the hypergradient. In both it starts from the (x, y) of the last message that it got:

    inner   y_{e+1} = y_e − η G_e,   G_e = ∇y g_i(x, y_e; ξ_e)         G_i = (1/E_i) Σ_e G_e
            y ← y − β_k mean_i G_i                                                                K exchanges
    outer   H_i = ∇x f_i(x, y) − ∇²xy g_i(x, y) N_i s (I − s∇²yy g_i)^N' ∇y f_i,   N' uniform on {0..N_i−1}   (APHE)
            x ← x − α mean_i H_i                                                                  one exchange

Here p_i is client i's weight, and ξ_e are the samples of its e-th local step. N_i and s are the number of terms and the
step of a Neumann series. The mean mean_i is Σ p_i (.) / Σ p_i over the last replies of all clients that have replied at
least once, however old these replies are. (APHE) is the paper's approximation of the hypergradient. The age of a reply
is the number of exchanges since the client was asked for the reply. The history has two mean ages:
`delay.inner.gradients` for the replies G_i, and `delay.hypergradient.local_hypergradient` for the replies H_i (with
`SystemSteps`, `delay.outer_directions`).

If clients differ, the mean of the H_i is not the hypergradient, and x does not converge to the solution. `SystemSteps`
avoids this:

    outer   H_i = ∇x f_i − ∇²xy g_i v,   r_i = ∇²yy g_i v − ∇y f_i            (SimFBO's directions)
            x ← x − α mean_i H_i,   v ← v − γ mean_i r_i

Messages: the server sends x and y, and in the outer exchange of `SystemSteps` also v. Clients reply with a vector of
y's shape in inner exchanges, and with one of x's shape in outer exchanges (with `SystemSteps`, also one of v's).

Departures from the paper:
1. Algorithm 1 omits the local step y_{e+1} = y_e − η G_e, lets i run to N, and takes y^{t+1} = y^{t,K−1}. Here clients
   make local steps with their own step size η, i runs to M, and y^{t+1} = y^{t,K}.
2. APHE starts from f_i where ∇y f_i is meant. Its product always has N_i factors and is multiplied by max_i N_i, so
   that it tends to 0 as N_i grows. Here the number of factors is random, and the product is multiplied by N_i. The
   expectation of the product is then the series s Σ_{n<N_i} (I − s∇²yy g_i)^n. The default computes this series, and
   Neumann(sampling="random") computes the random product, as in the formula above. The length N_i is the same for all
   clients unless Neumann.terms has several numbers.
3. The server keeps a sum of the last replies, and no table of them: see parts/memory.py. The delay of a reply counts
   from the exchange in which it was asked for, and not from its arrival.
4. Weights are p_i, and not 1/M.
5. The paper says that delays require smaller step sizes, and that α and β have to be reduced by different factors. Here
   `Asynchronous` divides α and β by 1 + c·delay, where c is the field `delay_penalty` of `Asynchronous`. For each of
   the two, the delay is the mean delay of the replies that its step uses.

Checked in tests/algorithms/test_afbo.py (closed forms, event by event with a table), test_asynchronous.py,
test_local_x.py, test_own_leaves.py and tests/engines/test_agreement.py.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Hypergradient, LocalImplicit
from fedbilevel.algorithms.parts.inner import InnerRounds
from fedbilevel.algorithms.parts.local_steps import mean_gradient
from fedbilevel.algorithms.parts.nested import Nested, State
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import Schedule, positive
from fedbilevel.core.errors import is_count, require
from fedbilevel.core.facts import Allows, Facts, No, OwnParts
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import Step, StepByRound
from fedbilevel.core.tree import XYV, PyTree, move, scaled
from fedbilevel.oracles.products import directions


class MeanGradient(InnerRounds):
    """Run AFBO's inner rounds: the server steps along the mean of the clients' gradients on their local steps.

    Args:
        client_lr: η, the size of a client's local step on y. None: a twentieth of β; of the smallest β if there are
            several numbers, and of the first value if β is a function β_{t,k}.
        lr: β, the server's step size on y, in one of these forms: a number; a number for each inner round; or β_{t,k}
            as a function of the round and the inner round, such as `lambda t, k: 0.5 / (1 + t + k)`. None: it adapts
            during the run (`AdaptiveSteps`).
    """

    kind: ClassVar[str] = "mean-gradient"

    client_lr: Step = positive(default=None, own=True, adaptive="short", tied="lr")
    lr: StepByRound = positive(default=None, several=True, by_k=True, adaptive="shared")

    def validate(self) -> None:
        if isinstance(self.lr, tuple):
            each = f"or {self.rounds} numbers, one for each inner round"
            allowed = f"a number, {each if is_count(self.rounds) else 'since `rounds` is a function'}"
            require(len(self.lr) == self.rounds, "MeanGradient.lr", self.lr, allowed)

    def once(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        lr = jnp.asarray(self.lr)[fed.repetition] if isinstance(self.lr, tuple) else self.lr
        lr = lr.function(fed.repetition) if isinstance(lr, Schedule) else lr  # a function of k alone: see `Schedule.at`
        return move(y, -lr, fed.mean(self.gradients, (x, y), key, unbiased=True))

    @phase(takes=("x", "y"), gives="y", measures=True)
    def gradients(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with G_i, the mean of the gradients ∇y g_i along E_i local steps on y, in the shape of y."""
        x, y = at
        steps = self.steps(client, key)
        mean = mean_gradient(self.gradient_at(client, x, y), y, steps, self.client_lr)
        return Reply(mean, gradients=steps.tau)


class SystemSteps(Hypergradient):
    """Solve ∇²yy G·v = ∇y F by one step of the server on v in each outer exchange, as in SimFBO.

    Args:
        lr: γ, the server's step size on v; None: it adapts during the run (`AdaptiveSteps`).
    """

    kind: ClassVar[str] = "steps"

    lr: Step = positive(default=None, adaptive="shared")

    def start(self, y: PyTree) -> PyTree:
        """Return v before the first round: zeros in the shapes of y."""
        return optax.tree.zeros_like(y)


class AFBO(Nested):
    """Make inner rounds on y, then one step on x; replies to both may be late.

    Args:
        inner: the rounds on y, in which the server steps along the mean of the clients' mean gradients.
        hypergradient: how the hypergradient h is computed: by each client on its own (`LocalImplicit`, the paper's
            APHE), or with a vector v that the server keeps and updates by gradient steps (`SystemSteps`).
        outer_lr: α, the server's step size on x; None: it adapts during the run (`AdaptiveSteps`).
    """

    name = "afbo"
    facts = Facts(
        paper="Anonymous 2024",
        needs="g strongly convex in y; with `LocalImplicit`, g_i of every client",
        good_for="clients of very different speed, if no round should wait for stragglers",
        exchanges="K + 1",
        up="1 like x, K like y",
        hvps="N; 2 with `SystemSteps`",
        cost=(
            "a gradient of g; for each outer reply, a gradient of f and the products with the client's own ∇²g "
            "(`SystemSteps`: two products, computed in the same pass)"
        ),
        client_state="none; with `Asynchronous`, the last reply to each of the two phases",
        bias="clients' own hypergradients (not with `SystemSteps`); drift of y if τ > 1",
    )

    outer_lr: Step = positive(default=None, adaptive="x")
    inner: MeanGradient = MeanGradient()
    hypergradient: LocalImplicit | SystemSteps = LocalImplicit()

    @property
    def allows(self) -> Allows:
        steps = isinstance(self.hypergradient, SystemSteps)
        late = "inner.gradients", "outer_directions" if steps else "hypergradient.local_hypergradient"
        return self.hypergradient.allows._replace(late=late, local_x=self.outer_lr, own_y=self.own_y(steps, late[1]))

    def own_y(self, steps: bool, outer: str) -> Mapping[str, OwnParts] | No:
        """Return, for each phase, how clients step on their own leaves of y, or `No` with the reason why they cannot.

        Args:
            steps: whether the hypergradient comes from `SystemSteps`; otherwise each client computes h on its own.
            outer: the name of the phase in the outer exchange.
        """
        if isinstance(self.inner.lr, tuple | Schedule) and getattr(self.inner.lr, "by_k", True):
            return No("its steps on y (inner.lr) differ by inner round, and a client does not know the inner round")
        of_v = ("v", lambda method: method.hypergradient.lr)
        system = OwnParts(("y", "v"), (of_v,)) if steps else OwnParts(("y",), alone=True)
        return {"inner.gradients": OwnParts(("y",), (("y", lambda method: method.inner.lr),)), outer: system}

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        x, info, v = state.x, state.info, state.v
        y = self.inner.descend(fed, x, state.y, inner_key)
        if isinstance(self.hypergradient, LocalImplicit):
            h, info = self.hypergradient.estimate(fed, x, y, outer_key)
        else:
            h, r = fed.mean(self.outer_directions, XYV(x, y, v), outer_key, unbiased=True)
            v = move(v, -self.hypergradient.lr, r)
        return self.next_state(state, scaled(-self.outer_lr, h), y, info)._replace(v=v)

    @phase(takes=XYV("x", "y", "y"), gives=("x", "y"))
    def outer_directions(self, client: Client, at: XYV, key: Array) -> Reply:
        """Reply with a client's directions for x and v in `SystemSteps`, in the shapes of x and y.

        The two directions are H_i = ∇x f_i − ∇²xy g_i v and r_i = ∇²yy g_i v − ∇y f_i at the (x, y, v) of the message.
        """
        outer_key, inner_key = jax.random.split(key)
        found = directions(client.problem, at, client.outer_batch(outer_key), client.inner_batch(inner_key))
        metrics = {"outer_loss": found.outer_loss}
        return Reply((found.step.x, found.step.v), metrics=metrics, gradients=1, hvps=2)
