"""Which units of a model a client of small capacity holds.

importance   the units that weigh most: the largest sums of squares of all that would leave with a unit (RABO; after
             FIARSE, Wu et al., NeurIPS 2024, which does so weight by weight)
static       the first units, always the same (HeteroFL: Diao, Ding, Tarokh, ICLR 2021)
rolling      a window that moves on by one unit each round (FedRolex: Alam et al., NeurIPS 2022)
random       drawn anew by each client in each round; `fixed`: once
covered      the units in segments of as many as a client holds, dealt out to the clients of a capacity, so that each
             unit is held by as many of them as possible (the coverage of Zhou et al., NeurIPS 2023); each round deals
             every group of units anew, so that in time every weight between two groups is held; `fixed`: once
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.config import config, static
from fedbilevel.core.errors import require, require_count, unknown
from fedbilevel.core.submodel import ClientSlot, Pruned, UnitLayout, Units

Policy = Literal["importance", "static", "rolling", "random", "covered"]


@config
class UnitPolicy:
    """How units are chosen; of no effect where the clients have no capacities.

    Args:
        policy: "importance", "static", "rolling", "random" or "covered".
        pruned: "both", "x" or "y": whose units may be left out; with "x" groups of units that reach into y stay whole.
        fixed: of "random" and "covered": the same units in every round.
        min_coverage: of "covered": deal each segment but the first to exactly so many clients of a capacity, and the
            first to all others; None deals them out evenly.
    """

    policy: Policy = static(default="importance")
    pruned: Pruned = static(default="both")
    fixed: bool = static(default=False)
    min_coverage: int | None = static(default=None)

    def validate(self) -> None:
        for field, allowed in {"policy": get_args(Policy), "pruned": get_args(Pruned)}.items():
            if (got := {"policy": self.policy, "pruned": self.pruned}[field]) not in allowed:
                raise unknown(f"Submodels.{field}", got, allowed)
        drawn = self.policy in ("random", "covered")
        require(drawn or not self.fixed, "Submodels.fixed", True, f"False with policy = {self.policy!r}")
        require_count("Submodels.min_coverage", self.min_coverage, optional=True)
        given = self.min_coverage is not None
        require(
            self.policy == "covered" or not given, "Submodels.min_coverage", self.min_coverage, "for 'covered' alone"
        )

    @property
    def alike(self) -> bool:
        """Whether all clients of one capacity hold the same units."""
        return self.policy in ("importance", "static", "rolling")

    def units(
        self, unit_layout: UnitLayout, kept: Mapping[str, int], importance: Mapping[str, Array], holder: ClientSlot
    ) -> Units:
        """The units that a client holds, `kept` of them in each group."""
        key = holder.key if self.fixed else jax.random.fold_in(holder.key, holder.round)
        chosen = {}
        for number, (group, count) in enumerate(sorted(kept.items())):
            own_key, size = jax.random.fold_in(key, number), unit_layout.sizes[group]
            if self.policy == "importance":
                some = jnp.argsort(-importance[group], stable=True)[:count]
            elif self.policy == "static":
                some = jnp.arange(count)
            elif self.policy == "rolling":
                some = (jnp.arange(count) + holder.round) % size
            elif self.policy == "random":
                some = jax.random.permutation(jax.random.fold_in(own_key, holder.id), size)[:count]
            else:
                some = self.segment(size, count, own_key, holder)
            chosen[group] = jnp.sort(some.astype(jnp.int32))
        return chosen

    def segment(self, size: int, count: int, key: Array, holder: ClientSlot) -> Array:
        """One of ⌈size/count⌉ windows of `count` units, the last of which may overlap the one before."""
        segments = -(-size // count)
        dealt = holder.rank % segments
        if self.min_coverage is not None and segments > 1:
            enough = self.min_coverage * segments <= holder.peers
            allowed = f"at most {holder.peers // segments}: {holder.peers} clients share {segments} segments"
            require(enough, "Submodels.min_coverage", self.min_coverage, allowed)
            dealt = jnp.where(holder.rank < self.min_coverage * segments, dealt, 0)
        first = (dealt + jax.random.randint(key, (), 0, segments)) % segments * count
        return jnp.minimum(first, size - count) + jnp.arange(count)
