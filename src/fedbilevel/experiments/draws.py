"""What a search draws the values of fields from, and the sampler that draws them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.experiments import toml
from fedbilevel.experiments.sweep import Definition

if TYPE_CHECKING:
    import optuna

DIGITS = 4  # of a number that is drawn: as many as a paper quotes


@dataclass(frozen=True)
class Range:
    """What a field is drawn from: numbers between two ends, uniformly or in their logarithm; or a list of texts."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: Sequence[str] = ()

    @classmethod
    def parse(cls, name: str, text: str) -> Range:
        """From "0.001:1:log", "0:0.5" or, of whole numbers alone, "1:8".

        Raises:
            ConfigurationError: it is none of these.
        """
        form = "of the form LOW:HIGH or LOW:HIGH:log, LOW below HIGH, and above 0 with log"
        low, *rest = text.split(":")
        try:
            ends = [toml.parse_value(low.strip()), toml.parse_value(rest[0].strip())] if rest else []
        except ConfigurationError:
            ends = []
        fits = len(ends) == 2 and all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
        fits = fits and rest[1:] in ([], ["log"]) and ends[0] < ends[1] and bool(np.all(np.isfinite(ends)))
        log = rest[1:] == ["log"]
        require(fits and (not log or ends[0] > 0), f"--search {name}", text, form)
        return cls(ends[0], ends[1], log)

    def drawn(self, trial: optuna.Trial, name: str) -> str:
        """A value for a trial, as a text that `--set` takes."""
        if self.choices:
            return str(trial.suggest_categorical(name, list(self.choices)))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return str(trial.suggest_int(name, self.low, self.high, log=self.log))
        number = float(f"{trial.suggest_float(name, self.low, self.high, log=self.log):.{DIGITS}g}")
        return repr(min(max(number, float(self.low)), float(self.high)))


def ranges_of(definition: Definition) -> dict[str, Range]:
    """What each field is drawn from, the values of the grid among them; nothing where there is a grid alone."""
    ranges = {name: Range.parse(name, text) for name, text in definition.search.items()}
    choices = {name: Range(choices=list(texts)) for name, texts in definition.grid.items()}
    return {**ranges, **choices} if ranges else {}


def seeded_sampler() -> optuna.samplers.BaseSampler:
    """Optuna's tree-structured Parzen estimator, whose draws for a trial depend on its number and the trials before:
    an interrupted search goes on as it would have, and two workers never draw the same."""
    import optuna

    class Seeded(optuna.samplers.BaseSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return self._of(trial).infer_relative_search_space(study, trial)

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return self._of(trial).sample_relative(study, trial, search_space)

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            place = zlib.crc32(param_name.encode())  # or all fields of a trial would be drawn alike
            return self._of(trial, place).sample_independent(study, trial, param_name, param_distribution)

        def _of(self, trial: Any, place: int = 0) -> Any:
            seed = int(np.random.SeedSequence([trial.number, place]).generate_state(1)[0])
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    return Seeded()
