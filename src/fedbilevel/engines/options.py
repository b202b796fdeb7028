"""Hold the options of `solve`, which are its keyword arguments, and check which of them can be combined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.inputs import require_not_traced
from fedbilevel.core.metrics import MetricFunction, directions
from fedbilevel.core.privacy import Privacy
from fedbilevel.core.problem import Problem, SimpleBilevel, SingleLevel
from fedbilevel.core.tree import PyTree
from fedbilevel.display import Display
from fedbilevel.engines.engine import Cohort, Engine
from fedbilevel.engines.evaluation import Measure, PerClient, as_per_client, check_metrics
from fedbilevel.engines.history import Callback, check_callbacks
from fedbilevel.engines.process_group import current_group
from fedbilevel.engines.progress import require_progress

Resume = bool | Literal["auto", "force"]
RESUME = (False, True, "auto", "force")
OnDivergence = Literal["stop", "shrink"]
Requirement = tuple[bool, str, object, str]
"""(whether the condition holds, the field, its value, what is allowed): the arguments of `require`."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Hold the keyword arguments of `solve`, whose docstring explains them; each field is checked separately.

    `refuse_combinations` checks whether the options can be combined with each other, the problem and the clients.
    `check_cohort`, which needs the size of the population, checks the cohort.
    """

    rounds: int
    cohort: int | Cohort | None = None
    key: int | Array = 0
    engine: Engine | None = None
    eval_every: int | None = None
    metrics: Mapping[str, MetricFunction] | None = None
    metrics_per_client: Mapping[str, Measure | PerClient] | None = None
    best_by: str | None = None
    on_divergence: OnDivergence | None = None
    privacy: Privacy | None = None
    callbacks: Sequence[Callback] = ()
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None
    resume: Resume = False
    count_flops: bool = False
    progress: bool | Display | None = None

    def __post_init__(self) -> None:
        require_count("rounds", self.rounds)
        require_count("eval_every", self.eval_every, optional=True)
        require_count("checkpoint_every", self.checkpoint_every, optional=True)
        require(self.resume in RESUME, "resume", self.resume, "True, False, 'auto' or 'force'")
        named = self.best_by is None or isinstance(self.best_by, str)
        require(named, "best_by", self.best_by, "the name of a column of the history")
        known = self.on_divergence in (None, "stop", "shrink")
        require(known, "on_divergence", self.on_divergence, "'stop', 'shrink' or None")
        terms = self.privacy is None or isinstance(self.privacy, Privacy)
        require(terms, "privacy", self.privacy, "fedbilevel.Privacy(…) or None")
        check_callbacks(self.callbacks)
        require_progress(self.progress)
        require_not_traced("key", self.key)
        is_seed = isinstance(self.key, Integral) and not isinstance(self.key, bool)
        require(is_seed or _is_key(self.key), "key", self.key, "a whole number or a key made by jax.random.key")
        check_metrics(self.metrics)
        _ = self.directions  # computing it also checks the metrics' names

    @property
    def jax_key(self) -> Array:
        """Return the key as a JAX key; this starts JAX."""
        return self.key if isinstance(self.key, Array) else jax.random.key(int(self.key))

    @property
    def path(self) -> Path | None:
        """Return the path of the checkpoint; None if the run is not saved."""
        return None if self.checkpoint is None else Path(self.checkpoint)

    @property
    def per_client(self) -> dict[str, PerClient]:
        """Return the metrics per client by name, each as a `PerClient`."""
        return as_per_client(self.metrics_per_client)

    @property
    def directions(self) -> dict[str, bool]:
        """Return, for each metric by name, whether a larger value is better."""
        return directions({**self.per_client, **(self.metrics or {})})


def _is_key(key: object) -> bool:
    """Return whether an object is a single JAX key."""
    return isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()


def refuse_combinations(
    options: RunOptions, problem: Problem, clients: Clients | RemoteClients, y0: PyTree = None
) -> None:
    """Check that the options can be combined with each other, the problem, the clients and the start.

    Raises:
        ConfigurationError: the options cannot be combined; the message names the first requirement that does not hold.
    """
    for requirement in requirements(options, problem, clients, y0):
        require(*requirement)


def requirements(
    options: RunOptions, problem: Problem, clients: Clients | RemoteClients, y0: PyTree
) -> Iterator[Requirement]:
    """List the requirements on combinations of options, problem, clients and start."""
    resume, on_divergence, privacy = options.resume, options.on_divergence, options.privacy
    yield not resume or options.checkpoint is not None, "resume", resume, "used together with checkpoint"

    stops, remote = on_divergence != "shrink", isinstance(clients, RemoteClients)
    here = not remote and current_group().processes == 1
    yield stops or here, "on_divergence", on_divergence, "'stop' if other processes also have the step sizes"
    public, kept = privacy is None, "replies that clients have sent cannot be withdrawn"
    yield public or not remote, "privacy", privacy, "None in a federation, where each site sets its own"
    yield public or stops, "on_divergence", on_divergence, f"'stop' under privacy, since {kept}"
    measured, exact = [*options.per_client], "these values would be sent without noise"
    yield public or not measured, "metrics_per_client", measured, f"None under privacy, since {exact}"

    kind = type(problem).__name__
    inner = not isinstance(problem, SingleLevel | SimpleBilevel)
    yield inner or y0 is None, "y0", y0, f"None, as {kind} problems have no inner variable"
    known = not isinstance(problem, SimpleBilevel) or problem.known
    yield known, "SimpleBilevel.outer", None, "a function (x) on the server, which needs H"

    given = {name: values.rounds for name, values in clients.own.items()}
    if clients.capacity is not None and clients.capacity.ndim == 2:
        given["capacity"] = len(clients.capacity)
    for name, most in given.items():
        enough = most is None or options.rounds <= most
        yield (
            enough,
            "rounds",
            options.rounds,
            f"at most {most}, the number of rounds for which the clients' {name} are given",
        )
