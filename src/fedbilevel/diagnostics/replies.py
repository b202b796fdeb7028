"""Measure the norms of clients' replies, by phase and part, and how far x and y move because of the noise of privacy.

The norms help to choose a clip, and the movement by noise helps to choose step sizes: see docs/explanation/privacy.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from fedbilevel.algorithms.parts.layers import layers_at
from fedbilevel.core.card import Card, Shown, aligned
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import NonFiniteError, require
from fedbilevel.core.fed import Reply
from fedbilevel.core.privacy import Privacy, norm_of, private_part, vector_of
from fedbilevel.core.tree import PyTree, split
from fedbilevel.engines.reference import Reference
from fedbilevel.engines.solve import solve

ALL = "all"
SILENT = 1e-20  # a noise multiplier so small that replies are clipped and get practically no noise


@dataclass(frozen=True)
class Moved:
    """Hold how far a variable moves in all rounds, in L2 norm: by the noise alone, and without noise.

    `by_noise` is infinite if the run with noise diverges.
    """

    by_noise: float
    without: float

    def __str__(self) -> str:
        text = f"noise moves it by {self.by_noise:.3g}, rounds without noise by {self.without:.3g}"
        hidden = ": noise hides the progress; lower steps, clip or noise_multiplier"
        return text + hidden if self.by_noise > self.without else text


@dataclass(frozen=True, repr=False)
class ReplyNorms(Shown):
    """Hold the result of `reply_norms`, which prints as a table.

    Args:
        norms: for each (phase, part), the L2 norms of that part in all replies. Parts are the fields of an update;
            "all" is everything that a clip bounds, which excludes public and withheld fields.
        numbers: for each (phase, part), how many numbers the part has.
        privacy: the terms of privacy, if any.
        moved: for each variable, how far it moves under these terms, with the noise of one key.
    """

    norms: Mapping[tuple[str, str], np.ndarray]
    numbers: Mapping[tuple[str, str], int]
    privacy: Privacy | None
    moved: Mapping[str, Moved]

    def card(self) -> Card:
        lines = {phase: f"median {np.median(norms):.3g}" for (phase, part), norms in self.norms.items() if part == ALL}
        return Card("L2 norms of replies", {**lines, **self._in_words(), "more": "print(…) for all parts and deciles"})

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("phase", "part", "numbers", "replies", "10 %", "median", "90 %")]
        for (phase, part), norms in self.norms.items():
            deciles = [f"{size:.3g}" for size in np.percentile(norms, (10, 50, 90))]
            table.append((phase, part, str(self.numbers[phase, part]), str(len(norms)), *deciles))
        return "\n".join([aligned(table), *(f"{name}: {text}" for name, text in self._in_words().items())])

    def _in_words(self) -> dict[str, str]:
        if (terms := self.privacy) is None:
            return {}
        said = {}
        for (phase, part), norms in self.norms.items():
            if part == ALL:
                noise = terms.clip * terms.noise_multiplier
                long = noise * math.sqrt(self.numbers[phase, part])
                shortened = f"clip = {terms.clip:g} shortens {np.mean(norms > terms.clip):.0%} of replies"
                said[f"noise of {phase}"] = (
                    f"{shortened}; noise of zC = {noise:.3g} per number has a norm of {long:.3g}"
                )
        return {**said, **{name: str(moved) for name, moved in self.moved.items()}}


def reply_norms(
    algorithm: Any,
    problem: Any,
    clients: Clients,
    x: PyTree,
    y: PyTree = None,
    *,
    rounds: int = 10,
    cohort: Any = None,
    privacy: Privacy | None = None,
    key: int = 0,
) -> ReplyNorms:
    """Run some rounds, and measure the norms of replies; with terms of privacy, also how far x and y move by noise.

    The norms are measured without clipping, in rounds without privacy. In a federation, only a site itself knows the
    norms of its replies.

    Args:
        algorithm, problem, clients, x, y, cohort, key: as for `solve`.
        rounds: the number of rounds, which the engine `Reference` runs.
        privacy: the terms of differential privacy to try, the same for every client; None: only the norms of replies
            are measured.

    Raises:
        ConfigurationError: an argument is not allowed.
        NumericalError: see `solve`; only for rounds without noise.
    """
    norms, numbers = defaultdict[tuple[str, str], list[float]](list), dict[tuple[str, str], int]()

    def note(phase: str, client: int, reply: Reply) -> None:
        for part, leaves in parts_of(reply.update).items():
            norms[phase, part].append(float(norm_of(vector_of(leaves))))
            numbers[phase, part] = sum(leaf.size for leaf in leaves)

    require(privacy is None or isinstance(privacy, Privacy), "privacy", privacy, "fedbilevel.Privacy(…) or None")
    coded = [type(layer).__name__ for layer in layers_at(algorithm) if layer.place == "coded"]
    require(not coded, "algorithm", f"with {', '.join(coded)}", "a method without a layer that codes replies")
    play = partial(solve, algorithm, problem, clients, x, y, cohort=cohort, key=key)
    moved = {}
    if privacy is not None:
        silent = replace(privacy, noise_multiplier=SILENT, budget=None)
        ends = play(rounds=rounds, privacy=silent)
        try:
            noised = play(rounds=rounds, privacy=replace(privacy, budget=None))
        except NonFiniteError:
            noised = None
        for name, start in {"x": x, "y": y}.items():
            if start is not None:
                end = getattr(ends, name)
                moved[name] = Moved(distance(getattr(noised, name), end) if noised else math.inf, distance(end, start))
    play(rounds=rounds, engine=Reference(on_reply=note))
    return ReplyNorms({at: np.array(found) for at, found in norms.items()}, numbers, privacy, moved)


def parts_of(update: PyTree) -> dict[str, list[Any]]:
    """Return a dict: field of the update -> those of its leaves that a clip bounds.

    The key ALL has the leaves of all fields.
    """
    leaves = jax.tree_util.tree_leaves_with_path(private_part(update))
    parts: dict[str, list[Any]] = {ALL: [leaf for _, leaf in leaves]}
    for path, leaf in leaves if len({path[:1] for path, _ in leaves}) > 1 else ():
        parts.setdefault(jax.tree_util.keystr(path[:1], simple=True), []).append(leaf)
    return parts


def distance(one: PyTree, other: PyTree) -> float:
    """Return the L2 norm of the difference of two trees, over their floating leaves."""
    return float(optax.tree.norm(optax.tree.sub(split(one)[0], split(other)[0])))
