"""Model virtual time: how long clients take to compute and to reply, and when they are available.

Times are whole numbers of ticks, so that engines that sum them in different orders agree on the order of all events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.errors import require
from fedbilevel.core.own import Computed, Given, numbers_of, read_rule

TICK = 1e-4  # the length of a tick, in virtual seconds
LONGEST = 2**27  # the largest time of a computation, or of the network, in ticks: 3.7 hours; longer times are cut
QUANTILES = 4096  # the number of equally likely values of a log-normal factor


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Describe how long exchanges take, in virtual seconds: for the history's `time`, and for asynchronous methods.

    A client that is asked takes compute·(batch gradients and hvps of the phase) + network seconds, where each of the
    two parts is multiplied by a separate log-normal factor. An exchange that waits for all clients takes as long as the
    slowest client of its cohort. By default every exchange takes 1 second, so that `time` counts exchanges. Times are
    rounded to 0.1 ms, and each of the two parts is cut to 3.7 hours.

    Args:
        compute: seconds for a batch gradient or for an hvp (a product of a vector with second derivatives); one number,
            or a number per client.
        network: seconds for a message and its reply; one number, or a number per client.
        spread: σ of the log-normal factors, whose mean is 1; they are drawn anew for each exchange and client.
        stragglers: the number of slower clients, which `seed` draws.
        slowdown: by how much the computing and network times of stragglers are multiplied.
        drift: σ of another log-normal factor of each client, drawn anew every `period`.
        period: seconds between two draws of `drift`, and the length of a cycle of `availability`.
        availability: the share of each period in which a client is available, as one interval whose start `seed`
            draws; one number, or a number per client. A client that is not available finishes its work, but gets no
            new message until it is available again. A client with 0 never gets a message.
        seed: the seed of all these draws.
        arrivals: which clients reply in which exchange, in place of times, for asynchronous methods with `wait_for=1`.
            This is an array of booleans of shape (E, M), which says for each exchange and client whether the client
            delivers its reply at the end of the exchange, and which is repeated after E exchanges. Or it is a function
            (exchange, client, key), written with JAX's operations, that returns such a boolean. Exchanges are counted
            over all phases and rounds, and take `network` seconds each. A client that has replied gets its next message
            when the next exchange begins. An exchange takes place even if no client replies.
    """

    compute: float | Sequence[float] = 0.0
    network: float | Sequence[float] = 1.0
    spread: float = 0.0
    stragglers: int = 0
    slowdown: float = 5.0
    drift: float = 0.0
    period: float = 100.0
    availability: float | Sequence[float] = 1.0
    seed: int = 0
    arrivals: Sequence[Sequence[bool]] | Callable[[Any, Any, Any], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        longest = LONGEST * TICK
        for name in ("compute", "network"):
            _check(name, getattr(self, name), lambda a: (a >= 0) & (a <= longest), f"from 0 to {longest:.0f} seconds")
        for name in ("spread", "drift"):
            _check(name, getattr(self, name), lambda a: (a >= 0) & (a <= 5), "from 0 to 5")
        _check("slowdown", self.slowdown, lambda a: a > 0, "positive and finite")
        allowed = f"from {TICK} to {LONGEST * TICK:.0f} seconds"
        _check("period", self.period, lambda a: (a >= TICK) & (a <= LONGEST * TICK), allowed)
        _check("availability", self.availability, lambda a: (a >= 0) & (a <= 1), "from 0 to 1")
        whole = isinstance(self.stragglers, int) and not isinstance(self.stragglers, bool) and self.stragglers >= 0
        require(whole, "Clock.stragglers", self.stragglers, "a whole number, at least 0")
        seeded = isinstance(self.seed, int) and not isinstance(self.seed, bool) and 0 <= self.seed < 2**32
        require(seeded, "Clock.seed", self.seed, "a whole number from 0 to 2³² − 1")
        # Arrays become tuples, which == compares.
        for name in ("compute", "network", "spread", "slowdown", "drift", "period", "availability"):
            numbers = np.asarray(getattr(self, name), float)
            object.__setattr__(self, name, tuple(numbers.tolist()) if numbers.ndim else float(numbers))
        if self.arrivals is not None:
            self._check_arrivals()

    def _check_arrivals(self) -> None:
        """Store a table of arrivals as tuples; reject other settings that would also determine when clients reply."""
        for name in ("compute", "spread", "stragglers", "drift", "availability"):
            got, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            require(
                got == default, f"Clock.{name}", got, f"{default} with arrivals, which determine when clients reply"
            )
        require(isinstance(self.network, float), "Clock.network", self.network, "one number with arrivals")
        if callable(self.arrivals):
            gives = "a function (exchange, client, key) that returns a boolean"
            by_k = read_rule("Clock.arrivals", self.arrivals, gives, truths=True).by_k
            require(not by_k, "Clock.arrivals", self.arrivals, gives)
        else:
            try:
                table = np.asarray(self.arrivals)
            except ValueError:  # rows of unequal length
                table = np.asarray(None)
            fits = table.dtype == bool and table.ndim == 2 and table.size > 0
            require(fits, "Clock.arrivals", self.arrivals, "None, a function, or rows of booleans, one for each client")
            object.__setattr__(self, "arrivals", tuple(map(tuple, table.tolist())))

    def pace(self, clients: int) -> Pace:
        """Return the clock's tables for a population of `clients` clients."""
        rng = np.random.default_rng(self.seed)
        fits = self.stragglers <= clients
        require(fits, "Clock.stragglers", self.stragglers, f"at most {clients}, the number of clients")
        slower = np.ones(clients)
        slower[rng.permutation(clients)[: self.stragglers]] = self.slowdown
        compute = np.asarray(self._per_client("compute", clients) * slower / TICK, np.float32)
        network = np.asarray(self._per_client("network", clients) * slower / TICK, np.float32)
        slowest = max(compute.max(), network.max())
        require(
            slowest <= LONGEST,
            "Clock.slowdown",
            self.slowdown,
            f"small enough that no client takes more than {LONGEST * TICK:.0f} s",
        )
        period, always = round(self.period / TICK), bool(np.all(self._per_client("availability", clients) == 1))
        begins = rng.integers(period, size=clients)
        alike = not compute.any() and bool(np.all(network == network[0])) and self.spread == self.drift == 0
        return Pace(
            even=Ticks(int(np.round(network[0]))) if alike else None,
            compute=compute if compute.any() else None,
            network=network[0] if np.all(network == network[0]) else network,
            begins=None if always else begins.astype(np.int32),
            lasts=None if always else self._available_ticks(clients),
            spread=_factors(self.spread),
            drift=_factors(self.drift),
            period=np.int32(period),
            key=jax.random.key(self.seed),
            arrivals=self.schedule(clients),
        )

    def schedule(self, clients: int) -> Given | Computed | None:
        """Return `arrivals` in the form of clients' own numbers: 1 for a client that replies, else 0."""
        if self.arrivals is None:
            return None
        if callable(self.arrivals):
            return Computed(self.arrivals)
        table = np.asarray(self.arrivals)
        require(
            table.shape[1] == clients,
            "Clock.arrivals",
            f"rows of {table.shape[1]}",
            f"rows of {clients}, the number of clients",
        )
        return Given(table)

    def never_available(self, clients: int) -> np.ndarray:
        """List the ids of the clients that are never available."""
        return np.flatnonzero(self._available_ticks(clients) == 0)

    def _available_ticks(self, clients: int) -> np.ndarray:
        """Return the number of a period's ticks in which each client is available, as an array of shape (clients,)."""
        return np.round(self._per_client("availability", clients) * round(self.period / TICK)).astype(np.int32)

    def _per_client(self, name: str, clients: int) -> np.ndarray:
        value = np.asarray(getattr(self, name), float)
        fits = value.shape in ((), (clients,))
        require(fits, f"Clock.{name}", f"{value.size} numbers", f"one number, or {clients}, one per client")
        return np.broadcast_to(value, (clients,))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Ticks:
    """Hold a duration that is a constant of the program; a pytree without leaves."""

    number: int


class Pace(NamedTuple):
    """Hold a clock's tables for a population, in ticks; None in place of a table that has no effect."""

    even: Ticks | None  # the duration of every exchange of every client, if all are equal
    compute: Any  # ticks for a batch gradient or product, as an array of shape (M,)
    network: Any  # ticks for a message and its reply, as an array of shape (M,), or one number if all are equal
    begins: Any  # the tick of a period at which each client becomes available, as an array of shape (M,)
    lasts: Any  # for how many ticks each client is then available, as an array of shape (M,)
    spread: Any  # the factors of `Clock.spread`, as an array of shape (QUANTILES,)
    drift: Any  # the factors of `Clock.drift`, as an array of shape (QUANTILES,)
    period: Any
    key: Any
    arrivals: Any = None  # `Given` or `Computed`: whether a client delivers at the end of an exchange

    def durations(self, now: ClockState, ids: Array, units: Any) -> Any:
        """Compute the ticks that each of the P clients `ids` takes to reply: an array of shape (P,), or one number.

        Products are computed one after another, each with IEEE rounding, so that all compilers get the same ticks.

        Args:
            units: the number of batch gradients and hvps that each client computes, as an array of shape (P,), or one
                number.
        """
        if self.even is not None:
            return self.even.number
        network = jnp.asarray(self.network)
        parts = [network[ids] if network.ndim else network]
        if self.compute is not None:
            parts.append(jnp.asarray(self.compute)[ids] * jnp.asarray(units, jnp.float32))
        if self.spread is not None:
            draws = _draws(jax.random.fold_in(jax.random.fold_in(self.key, 0), now.exchanges), ids, len(parts))
            parts = [part * jnp.asarray(self.spread)[draws[:, k]] for k, part in enumerate(parts)]
        if self.drift is not None:
            draws = _draws(jax.random.fold_in(jax.random.fold_in(self.key, 1), now.periods), ids, 1)
            parts = [part * jnp.asarray(self.drift)[draws[:, 0]] for part in parts]
        whole = [jnp.minimum(jnp.round(part), LONGEST).astype(jnp.int32) for part in parts]
        return whole[0] if len(whole) == 1 else whole[0] + whole[1]

    def waits(self, now: ClockState, ids: Array, after: Any = 0) -> Any:
        """Compute the ticks until each of these clients is available, from `after` ticks on."""
        if self.begins is None:
            return 0
        within = (now.moment + after % self.period - jnp.asarray(self.begins)[ids]) % self.period
        return jnp.where(within < jnp.asarray(self.lasts)[ids], 0, self.period - within)

    def arriving(self, now: ClockState, ids: Array) -> Array:
        """Return whether each of these clients delivers at the end of this exchange; only for clocks with arrivals."""
        row = now.exchanges % self.arrivals.rounds if self.arrivals.rounds else now.exchanges
        key = jax.random.fold_in(self.key, now.exchanges)
        return numbers_of({"arrivals": self.arrivals}, key, row, ids)["arrivals"] != 0

    def ever_available(self, ids: Array | int) -> Any:
        """Return whether each of these clients is ever available."""
        return True if self.lasts is None else jnp.asarray(self.lasts)[ids] > 0


class ClockState(NamedTuple):
    """Hold the state of the clock, a part of the carry. The total duration is summed on the host."""

    exchanges: Array  # the number of exchanges so far
    periods: Array  # the number of completed periods
    moment: Array  # ticks since the last completed period

    @classmethod
    def start(cls) -> ClockState:
        return cls(*(jnp.zeros((), jnp.int32) for _ in cls._fields))

    def later(self, pace: Pace, ticks: Any) -> ClockState:
        """Return the state after an exchange of `ticks`; if nothing depends on the time, only exchanges are counted."""
        if pace.begins is None and pace.drift is None:
            counted = pace.spread is not None or pace.arrivals is not None
            return self._replace(exchanges=self.exchanges + 1) if counted else self
        moment = self.moment + ticks % pace.period
        return ClockState(
            self.exchanges + 1, self.periods + ticks // pace.period + moment // pace.period, moment % pace.period
        )


def _factors(sigma: float) -> np.ndarray | None:
    """Return QUANTILES equally likely values of a log-normal variable with mean 1."""
    if sigma == 0:
        return None
    normal = np.array([NormalDist().inv_cdf((k + 0.5) / QUANTILES) for k in range(QUANTILES)])
    values = np.exp(sigma * normal)
    return np.asarray(values / values.mean(), np.float32)


def _draws(key: Array, ids: Array, count: int) -> Array:
    """Draw `count` random indices of a table of factors for each of these clients, as an array (clients, count)."""
    bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i), (count,), jnp.uint32))(ids)
    return bits >> (32 - (QUANTILES - 1).bit_length())


def _check(name: str, value: Any, allowed: Any, words: str) -> None:
    try:
        numbers = np.asarray(value, float)
    except (TypeError, ValueError):
        numbers = np.asarray(np.nan)
    fits = numbers.ndim <= 1 and numbers.size > 0 and bool(np.all(np.isfinite(numbers) & allowed(numbers)))
    require(fits and not isinstance(value, str | bool), f"Clock.{name}", value, words)
