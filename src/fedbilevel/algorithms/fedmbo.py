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

Departures from the paper:
1. Server and clients exchange changes of y, and means are Σ p̃_i u_i with p̃_i = (M/P) p_i: see FedNest.
2. The T inner rounds ask the round's own cohort, the exchanges of the hypergradient a fresh one each.
3. The default is the expectation of that v, the series v = (1/ℓ) Σ_{n<N} (I − H/ℓ)^n ∇y F, for as many exchanges and
   without variance, which grows with N. Neumann(sampling="random_per_client") is the paper's.

Checked in tests/algorithms/test_fedmbo.py (closed forms, variance, exchanges) and tests/engines/test_agreement.py.
"""

from fedbilevel.algorithms.fednest import OneStep
from fedbilevel.algorithms.parts.hypergradients import Implicit
from fedbilevel.core.config import static
from fedbilevel.core.errors import require


class FedMBO(OneStep):
    """FedAvg on y, one global hypergradient step on x.

    Args:
        hypergradient: how the hypergradient is found, by products that are means over all clients.
        merged: as few exchanges as give the same numbers, with full batches (drawn samples: the same expectation):
            conjugate gradient has ∇²xy G with each product, "random_per_client" stops after the longest length drawn.
            Refused where nothing can be left out.

    Exchanges per round: T + N + 1; merged, "random_per_client" T + N' + 2 for the longest N'_i drawn, by conjugate
    gradient with K products T + K + 1, the others having nothing to merge. Client state: none.
    Cost per local step: a gradient of g.
    Needs: a bilevel, minimax or compositional problem; g strongly convex in y.
    Good for: cohorts of many clients, whose random lengths average out; one exchange for a step of x itself.
    Vectors up per client: 1 like x, T + N like y. Hvps per client: N. Bias: truncation; drift of y where τ > 1.
    """

    name = "fedmbo"

    hypergradient: Implicit = Implicit()
    merged: bool = static(default=False)

    def validate(self) -> None:
        allowed = "False: with the other fields as they are it leaves out no exchange"
        require(self.hypergradient.mergeable or not self.merged, "FedMBO.merged", True, allowed)

    @property
    def merges(self) -> bool:
        return self.merged
