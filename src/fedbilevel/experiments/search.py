"""A sweep whose points are drawn by Optuna, or shared by workers: processes with one storage play its trials.

The storage holds what each trial is and what came of it. A worker asks it for a trial, notes every few seconds that it
is alive, and at the end the outcomes. A trial whose worker has been silent for long is given to another worker; after
`ATTEMPTS` it counts as failed. So nothing waits for a worker that was killed, and whoever is left comes to the end.

A point may have several trials in the storage: the first, and those that took its place. The number of a point is the
rank of its first trial among all first ones, whoever plays it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import statistics
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbilevel.core.errors import ConfigurationError, FedbilevelError, is_number, require
from fedbilevel.engines import lock
from fedbilevel.experiments import toml
from fedbilevel.experiments.spec import Spec
from fedbilevel.experiments.sweep import Definition, Said, Show, Swept, in_a_line
from fedbilevel.sweeps.journal import DEFINITION, LOCK, claim, require_no_file
from fedbilevel.sweeps.outcome import Sweep
from fedbilevel.sweeps.plan import Job, TrialOutcome
from fedbilevel.wording import in_a_line as quoted
from fedbilevel.wording import missing

if TYPE_CHECKING:
    import optuna

STUDY = "fedbilevel"
STORAGE = "search.journal"  # in the sweep's folder, where no storage is given
BEAT, GRACE, POLL = 10.0, 60.0, 1.0  # seconds: between signs of life, until a worker counts as lost, between two looks
ATTEMPTS = 3  # at a point
ORIGINAL, ALIVE, RUNS = "original", "alive", "runs"  # what is noted about a trial, see above


def search_specs(
    definition: Definition,
    specs: Sequence[Spec | FedbilevelError],
    folder: str | Path,
    *,
    trials: int | None = None,
    storage: str | None = None,
    resume: bool = False,
    show: Show | None = None,
    said: Said | None = None,
) -> Sweep:
    """Play trials of a sweep, until all of them have been played by this process or by others with the same storage.

    Args:
        definition: with ranges to search, from which Optuna draws; or a grid alone, whose points are shared.
        specs: see `specs_of`.
        folder: where this worker's runs lie; workers on one file system may share it.
        trials: how many points are drawn in all, by all workers; of a grid alone None.
        storage: a database URL of SQLAlchemy (sqlite:///…, postgresql://…), or the path of a file; None keeps a file in
            the folder, for this process alone.
        resume: as `sweep_specs` has it; with a storage, a worker joins anyway.

    Raises:
        ConfigurationError: wrong input, another sweep in the storage or the folder, or Optuna is not installed.
    """
    require_optuna()
    folder, searched = Path(folder), ranges_of(definition)
    if searched:
        require(trials is not None, "--trials", None, "given with --search: the number of points to draw")
    else:
        require(trials is None, "--trials", trials, "left out without --search: a grid has as many points as it has")
    if definition.halving is not None:
        raise ConfigurationError("--halving goes with a grid that one process plays: without --search and --storage")
    swept = Swept.of(definition, specs, folder, show)
    count = trials if trials is not None else len(specs)
    recorded = definition.recorded(specs)
    require_no_file(folder)
    with lock.exclusive(folder / LOCK, folder) if storage is None else nullcontext():
        with lock.wait_for_lock(folder / LOCK) if storage is not None else nullcontext():
            begun = (folder / DEFINITION).is_file()
            claim(folder, recorded, join=resume or storage is not None)
            try:
                study = open_study(storage or str(folder / STORAGE), recorded, swept)
            except ConfigurationError:
                if not begun:
                    (folder / DEFINITION).unlink()  # the folder is free for a mended command
                raise
        worker = Worker(study, swept, searched, specs, count, said)
        worker.work()
        return worker.result()


def require_optuna() -> None:
    """Say what to install where Optuna is missing."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigurationError(f"--search and --storage need {missing('optuna', 'sweep')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def specs_of(definition: Definition) -> list[Spec | FedbilevelError]:
    """The specs of all points of a grid; of a search those at both ends of all ranges, with the first choices, which
    show that the fields are there and take such values."""
    searched = ranges_of(definition)
    if not searched:
        return definition.specs()
    ends = [
        {name: one.choices[0] if one.choices else repr(getattr(one, end)) for name, one in searched.items()}
        for end in ("low", "high")
    ]
    return [definition.spec_of(values) for values in ends]


def open_study(storage: str, recorded: Mapping[str, Any], swept: Swept) -> optuna.Study:
    """The study in a storage, which is made if need be.

    Raises:
        ConfigurationError: the storage cannot be used, or holds a sweep that was defined otherwise.
    """
    import optuna
    import sqlalchemy
    from optuna.storages.journal import JournalFileBackend

    file = storage.partition("sqlite:///")[2] if storage.startswith("sqlite:///") else storage
    first = lock.wait_for_lock(Path(f"{file}.begun")) if "://" not in file else nullcontext()  # who makes the tables
    waiting = {"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else {}  # while others write
    try:
        with first:
            opened: Any = (
                optuna.storages.RDBStorage(storage, engine_kwargs=waiting)
                if "://" in storage
                else optuna.storages.JournalStorage(JournalFileBackend(storage))
            )
            study = optuna.create_study(
                storage=opened,
                study_name=STUDY,
                direction="maximize" if swept.larger_is_better() else "minimize",
                sampler=seeded_sampler(),
                load_if_exists=True,
            )
    except (sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, ValueError) as error:
        raise ConfigurationError(without_password(f"--storage {storage} cannot be used: {quoted(error)}")) from None
    there = study.user_attrs.get("definition")
    if there is None:
        study.set_user_attr("definition", dict(recorded))
    elif there != dict(recorded):
        changed = next(name for name in {**there, **recorded} if there.get(name) != recorded.get(name))
        was, now = there.get(changed), recorded.get(changed)
        text = f"--storage {storage} has another sweep: {changed} is {was!r} there, and {now!r} here"
        raise ConfigurationError(without_password(text))
    return study


def without_password(text: str) -> str:
    """A text in which the password of a database's URL does not show."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", text)


class Worker:
    """Plays trials of a study until there are no more."""

    def __init__(
        self,
        study: optuna.Study,
        swept: Swept,
        searched: Mapping[str, Range],
        specs: Sequence[Spec | FedbilevelError],
        count: int,
        said: Said | None,
    ) -> None:
        self.study, self.swept, self.searched, self.count, self.said = study, swept, searched, count, said
        self.specs: dict[int, Spec | FedbilevelError] = {} if searched else dict(enumerate(specs))
        self.grid = [] if searched else swept.definition.texts()

    def work(self) -> None:
        """Play trials; where others still play theirs, wait until these have ended or their workers count as lost."""
        while True:
            points = self.points()
            self.rescue(points)
            if len(points) < self.count or any(_state(one, "WAITING") for point in points for one in point):
                self.play()
            elif all(settled(point) is not None or lost(point) for point in points):
                return
            else:
                time.sleep(POLL)

    def points(self) -> list[list[optuna.trial.FrozenTrial]]:
        """The trials of each point, the first attempt first; no more points than were asked for."""
        trials = sorted(self.study.get_trials(deepcopy=False), key=lambda one: one.number)
        found = {one.number: [one] for one in trials if ORIGINAL not in one.user_attrs}
        for one in trials:
            if ORIGINAL in one.user_attrs and one.user_attrs[ORIGINAL] in found:
                found[one.user_attrs[ORIGINAL]].append(one)
        return list(found.values())[: self.count]

    def rescue(self, points: Sequence[Sequence[optuna.trial.FrozenTrial]]) -> None:
        """End trials whose workers have been silent for long, and queue what has to be tried again."""
        import optuna

        for point in points:
            for one in point:
                if _state(one, "RUNNING") and time.time() - _last_sign(one) > GRACE:
                    self.study.tell(one.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
            over = settled(point) is None and all(_state(one, "FAIL") for one in point)
            if over and not lost(point):
                self.study.enqueue_trial(point[-1].params, user_attrs={ORIGINAL: point[0].number})

    def play(self) -> None:
        """Play one trial, or leave it where another worker was first."""
        import optuna

        trial = self.study.ask()
        points = self.points()
        number = next((i for i, point in enumerate(points) if trial.number in [one.number for one in point]), None)
        twin = number is not None and any(
            settled([one]) is not None or (_state(one, "RUNNING") and one.number < trial.number)
            for one in points[number]
        )
        if number is None or twin:
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
            return
        state, value = optuna.trial.TrialState.FAIL, None
        try:
            with alive(trial):
                outcomes = self.outcomes(trial, number)
            values = [one.row[self.swept.select] for one in outcomes if not one.error]
            whole = len(values) == len(outcomes)
            state = optuna.trial.TrialState.COMPLETE if whole else optuna.trial.TrialState.PRUNED
            value = statistics.fmean(values) if whole else None
            with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):  # it counted as lost
                trial.set_user_attr(RUNS, [dataclasses.asdict(one) for one in outcomes])
        except KeyboardInterrupt:
            trial.set_user_attr(ALIVE, 0.0)  # that is no failed attempt
            raise
        finally:  # so that no other worker need wait
            self.study.tell(trial, value, state=state, skip_if_finished=True)

    def outcomes(self, trial: optuna.Trial, number: int) -> list[TrialOutcome]:
        if self.searched:
            texts = {name: one.drawn(trial, name) for name, one in self.searched.items()}
            self.specs[number] = self.made(texts)
        else:
            texts = self.grid[number]
        trial.set_user_attr("values", texts)
        swept = dataclasses.replace(self.swept, specs=self.specs)
        found = []
        for seed in self.swept.seeds:
            job = Job(number, seed, 0)
            found.append(swept.trial(job, 1.0, last=True))
            if self.said is not None:
                self.said(in_a_line(job, found[-1], self.swept.select))
        return found

    def made(self, texts: Mapping[str, str]) -> Spec | FedbilevelError:
        """The spec with these values, or the error with which it is refused."""
        try:
            return self.swept.definition.spec_of(texts)
        except ConfigurationError as error:
            return error

    def result(self) -> Sweep:
        """What came of all trials, those of other workers included."""
        outcomes, values, made = {}, [], []
        for number, point in enumerate(self.points()):
            one = settled(point)
            texts = (one or point[-1]).user_attrs.get("values", {})
            runs = (
                one.user_attrs[RUNS]
                if one
                else [{"error": f"its worker was lost {ATTEMPTS} times"}] * len(self.swept.seeds)
            )
            for seed, run in zip(self.swept.seeds, runs, strict=True):
                outcomes[Job(number, seed, 0)] = TrialOutcome(**run)
            values.append({name: toml.parse_value(text) for name, text in texts.items()})
            made.append(self.specs.get(number) or self.made(texts))
        return Sweep(self.swept.plan(values), outcomes, made)


@contextmanager
def alive(trial: optuna.Trial) -> Iterator[None]:
    """Note every few seconds that the trial's worker lives, while the block runs."""
    import optuna

    ended = threading.Event()

    def beat() -> None:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            while True:
                trial.set_user_attr(ALIVE, time.time())
                if ended.wait(BEAT):
                    return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def settled(point: Sequence[optuna.trial.FrozenTrial]) -> optuna.trial.FrozenTrial | None:
    """The attempt at a point that came to its end, if one did."""
    ended = (one for one in point if RUNS in one.user_attrs and not _state(one, "FAIL") and one.state.is_finished())
    return next(ended, None)


def lost(point: Sequence[optuna.trial.FrozenTrial]) -> bool:
    """Whether a point has been tried so often that it is given up."""
    begun = [one for one in point if _state(one, "FAIL") and one.user_attrs.get(ALIVE)]
    return len(begun) >= ATTEMPTS and all(_state(one, "FAIL") for one in point)


def _state(trial: optuna.trial.FrozenTrial, name: str) -> bool:
    return bool(trial.state.name == name)


def _last_sign(trial: optuna.trial.FrozenTrial) -> float:
    began = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    return float(max(began, trial.user_attrs.get(ALIVE, 0.0)))


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
        fits = len(ends) == 2 and all(map(is_number, ends))
        fits = fits and rest[1:] in ([], ["log"]) and ends[0] < ends[1]
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
