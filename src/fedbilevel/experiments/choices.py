"""Things that a spec names and a program builds: schedules, server optimizers, local coefficients.

In a spec each is a table with its name and its numbers, e.g. {schedule = "cosine", start = 0.1, steps = 500},
{name = "adam", b1 = 0.9} or {name = "momentum", decay = 0.9}; the name alone takes the defaults.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import optax

from fedbilevel.algorithms.parts.local_optimizers import Momentum, Plain, Proximal
from fedbilevel.core.errors import ConfigurationError, require, unknown

REQUIRED = float("nan")  # in place of a default


@dataclass(frozen=True)
class Maker:
    """A function of numbers and flags, with their defaults."""

    function: Callable[..., Any]
    defaults: Mapping[str, float | bool]


@dataclass(frozen=True)
class Choice:
    """A closed list of makers."""

    kind: str  # as errors call it
    key: str  # the entry of the table that holds the name
    makers: Mapping[str, Maker]
    rules: Mapping[str, tuple[Callable[[Any], bool], str]] = field(default_factory=dict)  # which numbers are allowed

    def complete(self, place: str, given: Any) -> dict[str, Any]:
        """The table with every number filled in, or an error that names the field."""
        table = {self.key: given} if isinstance(given, str) else given
        if not isinstance(table, Mapping) or not isinstance(table.get(self.key), str):
            example = f'{{{self.key} = "{next(iter(self.makers))}", …}}'
            raise ConfigurationError(f"{place} = {given!r} is not allowed: it must be a table like {example}")
        name = table[self.key]
        if name not in self.makers:
            raise unknown(f"{self.kind} for {place}", name, self.makers)
        defaults = self.makers[name].defaults
        out: dict[str, Any] = {self.key: name}
        for extra in sorted(set(table) - set(defaults) - {self.key}):
            raise unknown(f"field of the {self.kind} {name!r} in {place}", extra, defaults)
        for entry, default in defaults.items():
            out[entry] = _number(f"{place}.{entry}", table.get(entry, default), isinstance(default, bool))
            if entry in self.rules:
                fits, allowed = self.rules[entry]
                require(fits(out[entry]), f"{place}.{entry}", out[entry], allowed)
        return out

    def build(self, table: Mapping[str, Any]) -> Any:
        """What a complete table describes."""
        fields = {name: value for name, value in table.items() if name != self.key}
        return self.makers[table[self.key]].function(**fields)


def _number(field: str, value: Any, flag: bool) -> Any:
    if flag:
        require(isinstance(value, bool), field, value, "true or false")
        return value
    if isinstance(value, float) and value != value:
        raise ConfigurationError(f"{field} is missing: it must be given, a number")
    require(isinstance(value, int | float) and not isinstance(value, bool), field, value, "a number")
    return value


def cosine(start: float, steps: int, end: float) -> optax.Schedule:
    """From start to end along half a cosine in `steps` rounds, then constant."""
    return optax.cosine_decay_schedule(start, steps, alpha=end / start)


def linear(start: float, steps: int, end: float) -> optax.Schedule:
    """From start to end on a line in `steps` rounds, then constant."""
    return optax.linear_schedule(start, end, steps)


def exponential(start: float, steps: int, rate: float) -> optax.Schedule:
    """start · rate^(round/steps)."""
    return optax.exponential_decay(start, steps, rate)


def polynomial(start: float, steps: int, end: float, power: float) -> optax.Schedule:
    """end + (start − end)(1 − round/steps)^power until `steps`, then constant."""
    return optax.polynomial_schedule(start, end, power, steps)


def inverse_sqrt(start: float, steps: int) -> optax.Schedule:
    """start / √(1 + round/steps)."""
    return lambda round: start / jnp.sqrt(1 + round / steps)


POSITIVE = (lambda value: 0 < value < math.inf, "a positive finite number")
STEPS = {
    "start": POSITIVE,
    "end": (lambda value: 0 <= value < math.inf, "zero or a positive finite number"),
    "rate": POSITIVE,
    "power": POSITIVE,
    "steps": (lambda value: isinstance(value, int) and value >= 1, "a positive whole number of rounds"),
}

SCHEDULES = Choice(
    "schedule",
    "schedule",
    {
        "cosine": Maker(cosine, {"start": REQUIRED, "steps": REQUIRED, "end": 0.0}),
        "exponential": Maker(exponential, {"start": REQUIRED, "steps": REQUIRED, "rate": REQUIRED}),
        "inverse_sqrt": Maker(inverse_sqrt, {"start": REQUIRED, "steps": 1}),
        "linear": Maker(linear, {"start": REQUIRED, "steps": REQUIRED, "end": 0.0}),
        "polynomial": Maker(polynomial, {"start": REQUIRED, "steps": REQUIRED, "end": 0.0, "power": 2.0}),
    },
    STEPS,
)
"""Step sizes that depend on the round."""

OPTIMIZERS = Choice(
    "server optimizer",
    "name",
    {
        "sgd": Maker(lambda: optax.sgd(1.0), {}),
        "momentum": Maker(lambda decay, nesterov: optax.sgd(1.0, decay, nesterov), {"decay": 0.9, "nesterov": False}),
        "adagrad": Maker(lambda initial, eps: optax.adagrad(1.0, initial, eps), {"initial": 0.1, "eps": 1e-7}),
        "adam": Maker(lambda b1, b2, eps: optax.adam(1.0, b1, b2, eps), {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
        "amsgrad": Maker(lambda b1, b2, eps: optax.amsgrad(1.0, b1, b2, eps), {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
        "yogi": Maker(lambda b1, b2, eps: optax.yogi(1.0, b1, b2, eps), {"b1": 0.9, "b2": 0.999, "eps": 1e-3}),
    },
)
"""Optax optimizers of learning rate 1, since the server's own step size multiplies what they give."""


def _configuration(cls: Any) -> Maker:
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)}
    return Maker(cls, defaults)


COEFFICIENTS = Choice(
    "local coefficients",
    "name",
    {cls.__name__.lower(): _configuration(cls) for cls in (Plain, Momentum, Proximal)},
)
"""How clients weigh their local gradients."""
