"""Risk-averse portfolio selection over several markets: a compositional problem with an exact optimum.

Shares w of n assets, of which Σ w = 1 is invested (short sales are allowed), with monthly returns r in percent:

    min over w of −E[rᵀw] + (λ/2) Var[rᵀw]        w = 1/n + x − mean(x),   x ∈ R^n, start 0

The expectation is over all markets, each of which is a client that keeps its returns. As a composition, y ∈ R² holds
the first two moments, which are means over clients, and the loss outside is not linear in them:

    r_i(x) = (E_i[rᵀw], E_i[(rᵀw)²])        f(y) = −y_1 + (λ/2)(y_2 − y_1²)

so that averaging f(r_i(x)), each market with its own variance, leaves out how markets' means differ. Returns are drawn
from a factor model (generated data, no real market): loadings on three factors, the first common to all assets, premia
and volatilities differing between markets, factors and residuals with Student's t of 5 degrees of freedom.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.problem import Compositional
from fedbilevel.tasks.task import Floats, Task, require_memory

FACTORS = ((0.6, 4.0), (0.2, 2.0), (0.2, 1.5))  # mean and standard deviation of each, percent a month
RESIDUAL = (2.0, 5.0)  # range of the standard deviation of an asset's own part, percent a month
TAILS = 5  # degrees of freedom


class Moments(NamedTuple):
    """Hold the mean and the covariance of the returns over all markets."""

    mean: Floats  # (assets,)
    covariance: Floats  # (assets, assets)


def shares(x: Array) -> Array:
    """Compute w, which sums to 1 whatever x is."""
    return 1 / x.shape[0] + x - jnp.mean(x)


def moments_of(x: Array, batch: dict[str, Array]) -> Array:
    """Compute r_i, the first and second moment of the portfolio's return; shape (2,)."""
    earned = batch["returns"] @ shares(x)
    return jnp.stack([jnp.mean(earned), jnp.mean(earned**2)])


def portfolio(
    *,
    clients: int = 8,
    assets: int = 10,
    risk_aversion: float = 0.1,
    months: tuple[int, int] = (60, 240),
    heterogeneity: float = 1.0,
    seed: int = 0,
) -> Task:
    """Draw the markets' returns.

    Args:
        clients: markets; each weighs by its months.
        assets: n.
        risk_aversion: λ, per percent.
        months: fewest and most in a market.
        heterogeneity: how far markets' loadings, premia and volatilities differ (0: only by chance).
        seed: of the draw.
    """
    require(clients >= 1, "clients", clients, "positive")
    require(assets >= 2, "assets", assets, "at least 2")
    require(0 < risk_aversion < np.inf, "risk_aversion", risk_aversion, "positive and finite")
    require(2 <= months[0] <= months[1], "months", months, "a pair (fewest, most), at least 2 each")
    require(heterogeneity >= 0, "heterogeneity", heterogeneity, "at least 0")
    require_memory(sum(months) / 2 * assets, clients=clients)
    rng = np.random.default_rng(seed)
    premia, sizes = np.array(FACTORS).T
    loadings = rng.normal([1, 0, 0], [0.3, 1, 1], size=(assets, 3))
    own = rng.uniform(*RESIDUAL, size=assets)
    unit = np.sqrt((TAILS - 2) / TAILS)  # of Student's t, so that the variance is 1

    def market() -> dict[str, Floats]:
        count = int(rng.integers(months[0], months[1] + 1))
        volatility = np.exp(0.3 * heterogeneity * rng.normal())
        local = loadings + 0.3 * heterogeneity * rng.normal(size=loadings.shape)
        factors = premia * (1 + heterogeneity * rng.normal(size=3)) + sizes * unit * rng.standard_t(TAILS, (count, 3))
        return {"returns": volatility * (factors @ local.T + own * unit * rng.standard_t(TAILS, (count, assets)))}

    def risk(y: Array, batch: dict[str, Array]) -> Array:
        return -y[0] + risk_aversion / 2 * (y[1] - y[0] ** 2)

    population = Clients(outer=[market() for _ in range(clients)], weights="size")
    over_all = moments(population)
    best = solution(over_all, risk_aversion)
    distance = float(np.linalg.norm(best - 1 / assets))

    def regret(x: Array, y: Array) -> Array:
        """Compute Φ(x) − Φ* from the quadratic's curvature along w − w*: no difference of large numbers."""
        off = shares(x) - best
        return risk_aversion / 2 * off @ over_all.covariance @ off

    return Task(
        name="portfolio",
        problem=Compositional(risk, moments_of),
        clients=population,
        x0=jnp.zeros(assets),
        y0=jnp.zeros(2),
        metrics={"relative_error": lambda x, y: jnp.linalg.norm(shares(x) - best) / distance, "regret": regret},
    )


def moments(clients: Clients) -> Moments:
    """Compute the mean and the covariance of the returns over all markets, by the clients' weights."""
    rows = [clients.outer.row(i)["returns"] for i in range(len(clients))]
    mean = sum(p * row.mean(0) for p, row in zip(clients.weights, rows, strict=True))
    spread = sum(p * (row - mean).T @ (row - mean) / len(row) for p, row in zip(clients.weights, rows, strict=True))
    return Moments(np.asarray(mean), np.asarray(spread))


def solution(over_all: Moments, risk_aversion: float) -> Floats:
    """Compute w*: λ Σ w − μ is a multiple of the vector of ones, and w sums to 1."""
    n = len(over_all.mean)
    system = np.block([[risk_aversion * over_all.covariance, np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]])
    return np.asarray(np.linalg.solve(system, [*over_all.mean, 1.0])[:n])
