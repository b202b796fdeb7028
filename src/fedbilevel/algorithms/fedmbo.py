"""FedMBO: FedAvg on y, then one step on x along a hypergradient from lengths that clients draw each for itself.

Minhui Huang, Dewei Zhang, Kaiyi Ji. "Achieving Linear Speedup in Non-IID Federated Bilevel Learning". ICML 2023,
arXiv:2302.05412.

A round is T times FedAvg on y, then one hypergradient, every exchange of which asks fresh clients:

    y_{i,ν+1} = y_{i,ν} − (β/τ_i) ∇y g_i(x, y_{i,ν}; ζ_ν),   y ← mean_i y_{i,τ_i}                     T exchanges
    v = mean_i (N/ℓ) (I − H/ℓ)^{N'_i} ∇y f_i, each client drawing its N'_i uniformly from {0..N−1}    N exchanges
    x ← x − α mean_i [∇x f_i(x, y; ξ_i) − ∇²xy g_i(x, y; ζ_i) v]                                      one exchange

One length for all, as FedNest has it, leaves v with a variance that no number of clients reduces; with a length of
each client's own, that variance falls with their number, hence the paper's linear speed-up. The server needs no
client's vector for it: the first exchange brings Σ p̃_i ∇y f_i for each length apart, and each product takes in the
next of these sums.

RABO(hypergradient=Implicit()) computes the same on whole models, draw by draw, and with full batches FedNest-SGD does
with one step on x, for one exchange more.

Departures from the paper:
1. Server and clients exchange changes of y, and means are Σ p̃_i u_i with p̃_i = (M/P) p_i: see FedNest.
2. The T inner rounds ask the round's own cohort, each exchange of the hypergradient asks a fresh cohort.
3. The default is the expectation of that v, the series v = (1/ℓ) Σ_{n<N} (I − H/ℓ)^n ∇y F, for as many exchanges and
   without variance, which grows with N. Neumann(sampling="random_per_client") is the paper's.

v and h are `Implicit.estimate` of parts/hypergradients.py, whose products `Neumann.solve` asks for.

Checked in tests/algorithms/test_fedmbo.py (closed forms, variance, exchanges) and tests/engines/test_agreement.py.
"""

import jax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Implicit
from fedbilevel.algorithms.parts.inner import LocalSGD
from fedbilevel.algorithms.parts.nested import ALL_BILEVEL, Nested, State, allowed_by
from fedbilevel.core.config import positive
from fedbilevel.core.facts import Allows, Facts
from fedbilevel.core.fed import Fed
from fedbilevel.core.tree import scaled


class FedMBO(Nested):
    """FedAvg on y, one global hypergradient step on x.

    Args:
        inner: the rounds on y: FedAvg's local steps.
        hypergradient: how the hypergradient is found, by products that are means over all clients.
        outer_lr: α, the server's step on x; None adapts it (`AdaptiveSteps`).
    """

    name = "fedmbo"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Huang et al. 2023, arXiv:2302.05412",
        needs="g strongly convex in y",
        good_for="cohorts of many clients, whose random lengths average out; one exchange for a step of x itself",
        exchanges="T + N + 1; by conjugate gradient with K products T + K + 2",
        up="1 like x, T + N like y",
        hvps="N",
        cost="a gradient of g",
        bias="truncation; drift of y where τ > 1",
    )

    outer_lr: float = positive(default=None, adaptive="x")
    inner: LocalSGD = LocalSGD()
    hypergradient: Implicit = Implicit()

    @property
    def allows(self) -> Allows:
        return allowed_by(self)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner.descend(fed, state.x, state.y, inner_key)
        h, info = self.hypergradient.estimate(fed, state.x, y, outer_key)  # v, then h
        return self.next_state(state, scaled(-self.outer_lr, h), y, info)
