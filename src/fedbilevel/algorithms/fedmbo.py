"""FedMBO: FedAvg on y, then one step on x along a hypergradient for which every client draws its own length.

Minhui Huang, Dewei Zhang, Kaiyi Ji. "Achieving Linear Speedup in Non-IID Federated Bilevel Learning". ICML 2023,
arXiv:2302.05412.

A round makes T rounds of FedAvg on y, and then computes one hypergradient. Here F and G are the means of f_i and g_i,
H = ∇²yy G, ℓ is an upper bound of H's largest eigenvalue, and N is the number of terms of a series for H⁻¹. Each
exchange of the hypergradient asks a fresh cohort of clients:

    y_{i,ν+1} = y_{i,ν} − (β/τ_i) ∇y g_i(x, y_{i,ν}; ζ_ν),   y ← mean_i y_{i,τ_i}                     T exchanges
    v = mean_i (N/ℓ) (I − H/ℓ)^{N'_i} ∇y f_i, where client i draws N'_i uniformly from {0..N−1}       N exchanges
    x ← x − α mean_i [∇x f_i(x, y; ξ_i) − ∇²xy g_i(x, y; ζ_i) v]                                      one exchange

If all clients share one length N', as in FedNest, the variance of v does not fall with the number of clients. If each
client draws its own length, the variance falls with the number of clients, which gives the paper's linear speed-up. The
server never needs the vector of a single client: the first exchange returns, for each length, the sum of p̃_i ∇y f_i
over the clients that drew this length. After each product, the server adds the sum that belongs to the next shorter
length.

If clients hold whole models, RABO(hypergradient=Implicit()) computes the same numbers as FedMBO from the same draws.
With full batches and one step on x, FedNest-SGD computes the same numbers too, with one more exchange.

Departures from the paper:
1. Server and clients exchange changes of y, and means are Σ p̃_i u_i with p̃_i = (M/P) p_i: see FedNest.
2. The T inner rounds ask the round's cohort, and each exchange of the hypergradient asks a fresh cohort.
3. The default is the expectation of the v above, the series v = (1/ℓ) Σ_{n<N} (I − H/ℓ)^n ∇y F. The series takes the
   same number of exchanges, and avoids the variance from random lengths, which grows with N. The paper's method is
   Neumann(sampling="random_per_client").

`Implicit.estimate` in parts/hypergradients.py computes v and h, and `Neumann.solve` asks for the products.

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
from fedbilevel.core.field_types import Step
from fedbilevel.core.tree import scaled


class FedMBO(Nested):
    """Run FedAvg on y, and take one step on x along the hypergradient of all clients.

    Args:
        inner: the rounds on y, by FedAvg's local steps.
        hypergradient: how the hypergradient is computed, with products that are means over all clients.
        outer_lr: α, the server's step size on x; None: it adapts during the run (`AdaptiveSteps`).
    """

    name = "fedmbo"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Huang et al. 2023, arXiv:2302.05412",
        needs="g strongly convex in y",
        good_for="cohorts of many clients, whose random lengths average out; the step on x needs one exchange",
        exchanges="T + N + 1; with `CG` in C iterations, T + C + 2",
        up="1 like x, T + N like y",
        hvps="N",
        cost="a gradient of g",
        bias="truncation; drift of y if τ > 1",
    )

    outer_lr: Step = positive(default=None, adaptive="x")
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
