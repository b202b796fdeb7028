"""A run in progress on the host's side: play rounds in stretches, evaluate, save, call back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.parts.private import quantiles, replies_at_most
from fedbilevel.core import interrupts
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.config import halved
from fedbilevel.core.errors import (
    CheckpointError,
    CheckpointWarning,
    ExchangeError,
    NonFiniteError,
    NumericalError,
    NumericalWarning,
    diverged,
    require,
    warn,
)
from fedbilevel.core.local_x import gather_x
from fedbilevel.core.metrics import best, text
from fedbilevel.core.privacy import SPENT, Privacy
from fedbilevel.core.tree import PyTree, join, nonfinite_leaves, split
from fedbilevel.display import Display, Silent
from fedbilevel.engines import checkpoint as files
from fedbilevel.engines.costs import ExchangeKind, Ledger, empty_costs
from fedbilevel.engines.divergence import Met, far_away, grown, what_to_lower
from fedbilevel.engines.engine import Carry, Run, Stretch
from fedbilevel.engines.evaluation import Evaluation, PerClientRow
from fedbilevel.engines.fingerprint import Fingerprint
from fedbilevel.engines.history import Best, Callback, History, Result, Row, has
from fedbilevel.engines.local.samples import local
from fedbilevel.engines.multihost import LostProcess, ProcessGroup, current_group
from fedbilevel.wording import require_object

STRETCH_SECONDS = 0.5  # of rounds between two looks at callbacks and Ctrl-C
SAVE_SECONDS = 1.0  # between two checkpoints, at least, where nobody says how many rounds
SAVE_SHARE = 0.1  # of the time that goes to them, at most
FORCE = 'resume="force", in a shell --force, goes on with what is given now'  # where a checkpoint is of another run


@dataclass(frozen=True)
class LoopPlan:
    """The rounds at which a run evaluates, saves and ends, where it saves, and what identifies it."""

    rounds: int
    eval_every: int
    save_every: int | None  # None: by the clock
    path: Path | None
    begun: Fingerprint

    def until_next_stop(self, round: int) -> int:
        """Count the rounds to the next row, save or end: these fall on the same rounds after a resumption."""
        stops = [every - round % every for every in (self.eval_every, self.save_every) if every]
        return min(self.rounds - round, *stops)


Begin = Callable[[Algorithm, Carry], tuple[Run, PerClientRow | None]]
"""Starts a run of a method from a carry, and says how its metrics of each client are measured, if there are any. It
does not know the loop: in a circle with it, the samples would stay until the garbage collector came."""


@dataclass
class Loop:
    """A run in progress, on the host's side."""

    plan: LoopPlan
    evaluation: Evaluation
    callbacks: Sequence[Callback]
    algorithm: Algorithm
    first: Callable[[PyTree, PyTree], Carry]  # the carry before round 0 of a run from x and y
    met: Callable[[PyTree, PyTree], Met]  # see `what_was_met`, by the last finite x and y
    history: History = field(default_factory=History)
    ledger: Ledger = field(default_factory=Ledger)
    seconds: float = 0.0  # in rounds, without compilation and evaluation
    losses: dict[str, list[Any]] = field(default_factory=dict)  # of each round since the last row
    began: dict[str, float] = field(default_factory=dict)  # the losses of the first round
    warned: bool = False
    growth: str = ""  # how far a loss, or the point, has grown, where that is too far
    told: str = ""  # the last warning of it
    norm: float | None = None  # of x and y at the first row of this process
    saved: int | None = None  # the round of the checkpoint at the plan's path, if that is known to be good
    everyone: bool = False  # whether each exchange asks all clients
    simulated: bool = True  # whether the clients' own states are in the carry
    next_save: float = -math.inf  # on this machine's clock, where the plan has no number of rounds; at once if resumed
    group: ProcessGroup = field(default_factory=current_group)  # of the processes that run together
    display: Display = field(default_factory=Silent)  # to whom it tells how far it is
    per_client: PerClientRow | None = None
    costs: Mapping[ExchangeKind, int] | None = None  # of a client's reply, in flops, where they are known
    begin: Begin = field(init=False)
    run: Run = field(init=False)
    best_by: str | None = None
    best: Best | None = None
    halvings: int = 0  # of the steps, so far
    halvings_at_most: int = 0
    diverged: bool = False
    gave_up: str = ""  # why a run ended that went on diverging with smaller steps
    devices: int | None = None  # over which the engine spreads a cohort, where it has several
    privacy: Privacy | None = None  # of simulated clients
    latest: Carry | None = None  # a copy of that of the last row
    safe: Carry | None = None  # a copy to go back to

    def play(self, begin: Begin, carry: Carry) -> Result:
        """Play the rounds of a run that `begin` starts, and starts again with smaller steps where it diverges."""
        self.begin = begin
        self.run, self.per_client = begin(self.algorithm, carry)
        try:
            return self.play_on(carry)
        finally:
            self.run.close()

    def play_on(self, carry: Carry) -> Result:
        result, stop = self.result(carry), False
        reason = self.gave_up or self.ending(result)  # of a run that is resumed after its end
        speed = 0.0  # rounds per second; not known before the first stretch
        self.display.advance(result.round, self.plan.rounds)
        with interrupts.held() as came:
            if not self.history.rows:
                first = self.add_row(result)
                self.keep_safe(carry, first)
                self.save(carry)  # from now on there is something to resume
                given, stop, *_ = self.agree(result, first, bool(came), speed)
                reason = reason or given
            else:
                self.keep_safe(carry, self.history.rows[-1])
            while result.round < self.plan.rounds and not reason and not stop:
                stretch = min(max(1, int(speed * STRETCH_SECONDS)), self.plan.until_next_stop(result.round))
                try:
                    carry, speed, spent = self.advance(carry, stretch)
                    result = self.result(carry)
                    self.display.advance(result.round, self.plan.rounds)
                    end = spent or self.ending(result)
                    row_due = result.round % self.plan.eval_every == 0 or result.round == self.plan.rounds
                    new = result.round > self.history.rows[-1]["round"]  # else the budget allows no further round
                    row = self.add_row(result) if new and (end or row_due) else None
                    if row and self.growth and self.halvings_at_most:
                        result, carry, end = self.shrink(self.growth, result)
                        if not end:
                            continue
                        row = None
                    self.warn_of_growth(result, once=True)
                except LostProcess:
                    raise  # what the carry held went into the stretch
                except (ExchangeError, NonFiniteError) as error:
                    if isinstance(error, NonFiniteError) and self.may_shrink(result):
                        result, carry, reason = self.shrink(str(error), result)
                        if reason:
                            self.save(carry)
                        continue
                    good = getattr(error, "carry", None) or (carry if isinstance(error, ExchangeError) else None)
                    if isinstance(error, NonFiniteError):
                        error.result = result if good is None else self.result(good)
                        self.diverged = True
                    if good is not None:
                        self.save_before(error, self.back_to(good, result.round))
                    if isinstance(error, NonFiniteError) and error.of_iterate:
                        met = self.met(error.result.x, error.result.y)
                        smaller = "smaller steps may help, fb.diagnose suggests some"
                        advice = (smaller, what_to_lower(self.algorithm)) if met.by_steps else ()
                        error.args = ("; ".join(filter(None, (str(error), *advice, met.text))),)
                    raise
                self.keep_safe(carry, row)
                try:
                    reason, stop, speed, due = self.agree(result, row, bool(came), speed)
                except LostProcess:
                    raise
                except Exception as error:  # of a callback
                    self.save_before(error, carry)
                    raise
                reason = end or reason
                if due or reason or stop:
                    self.save(carry)
        if stop:
            interrupts.end(came, self.left_off(result.round))
        self.warn_of_growth(result)
        remarks = () if self.gave_up else (self.remark(result), *self.algorithm.remarks(result.state))
        return replace(result, stopped=reason, remarks=tuple(filter(None, remarks)))

    def keep_safe(self, carry: Carry, row: Row | None) -> None:
        """Keep a copy of the carry from which the best row was reached, if a run that diverges is to go on from it.

        The carry of that row itself may be on its way already: losses are those of the rounds before it. A run that is
        resumed goes back no further than to where it was resumed.
        """
        if self.halvings_at_most and row is not None:
            if self.best is not None and self.best.round == row["round"]:
                self.safe = self.latest
            self.latest = jax.tree.map(jnp.copy, carry)
            self.safe = self.safe or self.latest

    def may_shrink(self, result: Result) -> bool:
        """Say whether a run whose numbers are not finite goes back: not where its start is at fault."""
        if self.halvings_at_most == 0 or len(self.history.rows) > 1:
            return self.halvings_at_most > 0
        return self.halvings < self.halvings_at_most and not self.met(result.x, result.y).at_start

    def shrink(self, why: str, result: Result) -> tuple[Result, Carry, str]:
        """Go back to the row before the best, with half the steps; or for good, where they were halved often enough.

        Return the result and the carry there, and why the run ends, or "".
        """
        assert self.safe is not None
        if self.halvings == self.halvings_at_most:
            self.gave_up = self.diverging(why, result)
            warn(NumericalWarning(self.gave_up))
        carry = self.back_to(jax.tree.map(jnp.copy, self.safe), result.round)
        self.growth = ""
        if self.gave_up:
            return self.result(carry), carry, self.gave_up
        self.halvings += 1
        self.latest, self.algorithm = self.safe, halved(self.algorithm)
        text = f"{why}; back to round {int(carry.round)} with half the steps"
        warn(NumericalWarning(f"{text}, {self.halvings} of {self.halvings_at_most} times"))
        self.run.close()
        self.run, self.per_client = self.begin(self.algorithm, carry)
        return self.result(carry), carry, ""

    def advance(self, carry: Carry, rounds: int) -> tuple[Carry, float, str]:
        """Play some rounds, note their costs and losses, and return the speed that they had, and whether a budget of
        privacy allows no further round, in words."""
        began, compiling = time.perf_counter(), self.run.compile_seconds
        (carry, done, round_costs), spent = self.within_budget(carry, rounds)
        self.check_state(local(carry.state), int(carry.round) - done)
        elapsed = time.perf_counter() - began - (self.run.compile_seconds - compiling)
        self.seconds += elapsed
        self.ledger.add(round_costs, done, self.costs)
        for (_, name), (total, weight) in round_costs.metrics.items():
            if (told := np.asarray(weight) > 0).any():  # by a schedule nobody may have replied
                means = (np.asarray(total, float)[told].T / np.asarray(weight, float)[told]).T
                self.losses.setdefault(name, []).extend(means.tolist())
                if means.ndim == 1:
                    self.began.setdefault(name, float(means[0]))
        return carry, done / max(elapsed, 1e-9), spent

    def within_budget(self, carry: Carry, rounds: int) -> tuple[Stretch, str]:
        """Play some rounds, fewer where a client would pass its budget of privacy, none where it would in the next."""
        if (terms := self.privacy) is None:
            return self.run.advance(carry, rounds), ""
        while True:
            before = carry if terms.budget is None else jax.tree.map(jnp.copy, carry)
            try:
                stretch = self.run.advance(carry, rounds)
            except NonFiniteError:
                if terms.budget is None or rounds == 1:
                    raise
                carry, rounds = before, rounds // 2  # the budget may end the run before that round
                continue
            after = stretch.carry
            cost = terms.epsilon_after(replies_at_most(local(after.state), local(after.clients)))
            if terms.budget is None or cost <= terms.budget:
                return stretch._replace(costs=stretch.costs._replace(privacy=(cost, terms.delta))), ""
            carry, rounds = before, rounds // 2
            if rounds == 0:
                done = f"{SPENT} after round {int(carry.round)}: ε = {self.ledger.epsilon:.6g} at δ = {terms.delta:g}"
                return Stretch(carry, 0, empty_costs()), f"{done}, and {cost:.6g} after one more, over {terms.budget:g}"

    def back_to(self, carry: Carry, round: int) -> Carry:
        """Go back to the carry to save, which may be of before `round`, as an engine knows that to be the last good:
        what came after it is forgotten, but for its costs."""
        good = int(carry.round)
        if good < round:
            self.history.rows[:] = [row for row in self.history.rows if row["round"] <= good]
            self.ledger.rounds = good
            self.losses.clear()
        return carry

    def left_off(self, round: int) -> str:
        """Say where an interrupted run stands, and how to go on."""
        if self.plan.path is None:
            return f"ended after round {round} of {self.plan.rounds}; nothing was saved, as no checkpoint was asked for"
        saved = f"saved after round {round} of {self.plan.rounds} to {self.plan.path}"
        return f"{saved}; the same call with resume=True goes on from there"

    def ending(self, result: Result) -> str:
        """Say why the algorithm has nothing left to do, or ""."""
        return f"{self.algorithm.label} has finished" if self.algorithm.finished(result.state) else ""

    def check_state(self, state: Any, round: int) -> None:
        """Raise or warn of trouble that the algorithm sees in the state after some rounds, which began with `round`."""
        found = self.algorithm.findings(state)
        if found.error:
            raise NumericalError(f"round {round} or soon after: {found.error}")
        if not self.warned and found.warning:
            warn(NumericalWarning(f"round {round} or soon after: {found.warning}"))
            self.warned = True

    def result(self, carry: Carry) -> Result:
        """Take a snapshot: nothing changes the arrays of a server's state, and `gather_x` makes new arrays."""
        state = jax.device_put(local(carry.state))  # arrays stay where they are; NumPy's go to the device
        x = state.x if carry.local_x is None else carry.local_x
        if self.simulated and carry.local_x is not None:
            x = gather_x(local(carry.clients))
            if bad := nonfinite_leaves(x):
                raise diverged(f"round {int(carry.round)} or before, x: ", ", ".join(bad))
        x_fixed, y_fixed = self.evaluation.fixed
        return Result(
            x=join(x, x_fixed),
            y=join(state.y, y_fixed),
            round=int(carry.round),
            rounds=self.plan.rounds,
            history=self.history,
            ledger=self.ledger,
            compile_seconds=self.run.compile_seconds,
            best=self.best,
            state=state,
        )

    def add_row(self, result: Result) -> Row:
        """Evaluate and append to the history. Means are of exactly rounded sums: no partition of rounds shows."""
        row: Row = {"round": result.round, **self.ledger.columns(), "seconds": self.seconds}
        for name, values in self.losses.items():
            means = [math.fsum(one) / len(values) for one in np.reshape(values, (len(values), -1)).T.tolist()]
            if len(means) > 1 and self.privacy is not None:
                row |= quantiles(name, means, self.privacy.clip)
            else:
                row[name] = means[0]
        own = self.algorithm.findings(result.state).columns
        at = result.round, split(result.x)[0], result.state.y
        each = self.per_client(*at) if self.per_client else {}
        for name, value in [*self.evaluation(*at).items(), *each.items()]:
            new = name not in row and name not in own
            require(new, "metrics", name, "named otherwise: the history has a column of that name")
            row[name] = value
        row |= {name: float(value) for name, value in own.items()}
        if self.halvings:
            row["halvings"] = self.halvings
        self.history.rows.append(row)
        with np.errstate(over="ignore"):  # beyond what a float holds it is inf, and far away
            norm = math.hypot(*(np.linalg.norm(np.ravel(leaf)) for leaf in jax.tree.leaves((at[1], at[2]))))
        self.norm = norm if self.norm is None else self.norm
        began = (self.began if self.everyone else {}) if self.halvings_at_most else None
        self.growth = grown(self.history, self.losses, began) or far_away(result.round, self.norm, norm)
        self.losses.clear()
        column = self.best_by or "outer_loss"
        if column in row if self.best_by is None else has(row, column):
            larger = self.history.larger_is_better(column)
            if self.best is None or best((row[column], self.best.value), larger) != self.best.value:
                self.best = Best(result.x, result.y, result.round, column, row[column])
        result.best = self.best
        return row

    def remark(self, result: Result) -> str:
        """Say that a run ended worse than it began, or that its best row lies in its first half; or "".

        Both are warned of, but for a run whose last row is its best: training y may have raised the outer loss.
        """
        best, rows = self.best, self.history.rows
        if best is None or best.column not in rows[-1]:
            return ""
        values = [row[best.column] for row in rows if best.column in row]
        first, last = self.began.get(best.column, values[0]), values[-1]
        sign = -1 if self.history.larger_is_better(best.column) else 1
        bends = np.abs(np.diff(values, 2))  # of what falls or rises steadily they are 0, but for noise
        noise = 0.01 * max(abs(first), abs(last)) + 2 * float(np.median(bends)) if len(bends) else 0.1 * abs(first)
        lost, gained = sign * (last - best.value), sign * (first - best.value)
        ended, began, least = (text(best.column, value) for value in (last, first, best.value))
        if sign * (last - first) > noise:
            said = f"{best.column} ended at {ended}, worse than {began} at the start"
        elif 2 * best.round < result.round and lost > noise + 0.1 * gained:
            said = f"{best.column} ended at {ended}, after {least}"
        else:
            return ""
        if best.round == result.round:
            return f"{said}, where y was not trained; it was falling, and more rounds may lower it"
        remark = (
            f"{said}: result.best has x and y of its best row, of round {best.round}; {what_to_lower(self.algorithm)}"
        )
        if self.group.is_first:
            warn(NumericalWarning(remark))
        return remark

    def diverging(self, why: str, result: Result) -> str:
        """Say how far a loss, or the point, has grown, or what is not finite, and what helps."""
        met = self.met(result.x, result.y)
        advice = f"{what_to_lower(self.algorithm)}, fb.diagnose suggests steps" if met.by_steps else met.text
        return f"{why}: the run diverges; {advice}"

    def warn_of_growth(self, result: Result, once: bool = False) -> None:
        """Warn where the last row is far above the start, once for each row: the numbers are finite still."""
        if not self.growth or self.growth == self.told or (once and self.told):
            return
        self.told = self.growth
        if self.group.is_first:
            warn(NumericalWarning(self.diverging(self.growth, result)))

    def agree(self, result: Result, row: Row | None, interrupted: bool, speed: float) -> tuple[str, bool, float, bool]:
        """Agree among all processes on (reason to stop, whether to stop now, rounds per second, whether to save):
        process 0 decides, and a signal to any process stops all."""

        def here() -> tuple[str, float, bool]:
            reasons = [callback(result, row) for callback in self.callbacks]  # every one is called
            return next((str(reason) for reason in reasons if reason), ""), speed, self.save_due(result.round)

        reason, speed, due = self.group.decide(here)
        return reason, any(self.group.gather(interrupted)), speed, due

    def save_due(self, round: int) -> bool:
        """Tell whether to save after this round."""
        every = self.plan.save_every
        due = time.perf_counter() >= self.next_save if every is None else round % every == 0
        return due or round == self.plan.rounds

    def save(self, carry: Carry) -> None:
        """Write the checkpoint, if a path was given; where there are several processes, process 0 does."""
        path, began = self.plan.path, time.perf_counter()
        if path is None:
            return
        meta = {
            "fingerprint": asdict(self.plan.begun),
            "history": self.history.rows,
            "ledger": asdict(self.ledger),
            "seconds": self.seconds,
            "losses": self.losses,
            "began": self.began,
            "halvings": self.halvings,
            "diverged": self.diverged or bool(self.gave_up),
            "gave_up": self.gave_up,
            "devices": self.devices,
            "best": self.best and self.best[2:],
        }
        round = int(carry.round)
        if self.best is not None:
            carry = carry._replace(best=(split(self.best.x)[0], split(self.best.y)[0]))
        self.group.decide(lambda: files.save(path, carry, meta, keep=self.saved not in (None, round)))
        self.saved = round
        self.group.saved = str(path)
        now = time.perf_counter()
        self.next_save = now + max(SAVE_SECONDS, (now - began) / SAVE_SHARE)

    def save_before(self, error: Exception, carry: Carry) -> None:
        """Save before an error goes on. Where that fails too, the user still sees the error."""
        try:
            self.save(carry)
        except CheckpointError as failed:
            _warn(self.group, f"the run ends by {type(error).__name__}, and saving it failed: {failed}")

    def restore(self, carry: Carry, force: bool) -> Carry:
        """Continue from the plan's checkpoint; `carry` gives structure and shapes. `force`: also from another run's."""
        assert self.plan.path is not None
        path = self.plan.path
        newest = Path(self.group.decide(lambda: str(files.newest(path))))
        with self.group.copy_of(newest) as copy:
            carry, meta = self.state_of(copy, carry, force)
        with files.as_checkpoint_error(newest):
            self.compare(meta, force)
            carry = self.continue_from(meta, carry)
        if carry.state is None and self.best is not None:  # only the best row was read
            carry = self.anew(self.best, carry)
        if newest == path:
            self.saved = int(carry.round)
        elif self.group.is_first:
            _warn(self.group, f"{files.trouble(path)}: going on from {newest}, round {int(carry.round)}")
        done = int(carry.round)
        require(done <= self.plan.rounds, "rounds", self.plan.rounds, f"at least {done}, which the checkpoint has done")
        self.group.saved = str(self.plan.path)
        return carry

    def anew(self, best: Best, carry: Carry) -> Carry:
        """Begin the method again at the best row's x and y: the state of a run that diverged is no place to go on."""
        if self.privacy is not None:
            text = f"the run in {self.plan.path} diverged, and at its best row nobody knows what its clients have spent"
            raise CheckpointError(f"{text}: under privacy start anew elsewhere")
        _warn(self.group, f"the run diverged: going on from x and y of its best row, of round {best.round}")
        self.gave_up = ""
        begun = self.first(split(best.x)[0], split(best.y)[0])
        return self.back_to(
            begun._replace(round=jnp.full_like(carry.round, best.round), now=carry.now), int(carry.round)
        )

    def state_of(self, copy: Path, carry: Carry, force: bool) -> tuple[Carry, dict[str, Any]]:
        """Load what the checkpoint holds, by force of a run that diverged the best row alone; if it does not fit, and
        is of another algorithm, the error names both."""
        x, held = carry.state.x if carry.local_x is None else carry.local_x, files.load_meta(copy)
        best = (x, carry.state.y) if held.get("best") else None
        if "rounds" in held:
            raise CheckpointError(f"{self.plan.path} holds a result: a run is continued from its checkpoint alone")
        try:
            if force and held.get("diverged") and best and self.simulated:
                bare = carry._replace(state=None, clients=None, queues=None, local_x=None)
                return files.load(copy, bare._replace(best=best), part=True)
            return files.load(copy, carry._replace(best=best))
        except CheckpointError as error:
            stated = files.load_meta(copy).get("fingerprint", {}).get("stated", {})
            before, now = stated.get("algorithm"), self.plan.begun.stated["algorithm"]
            terms = {name for name in stated.keys() ^ self.plan.begun.stated.keys() if name.endswith("privacy.clip")}
            if terms and before == now:
                there, here = ("with", "without") if terms <= stated.keys() else ("without", "with")
                raise CheckpointError(f"{self.plan.path} belongs to a run {there} privacy, not {here}") from error
            if before in (None, now):
                raise
            text = f"{self.plan.path} holds the state of a run of {before}, which {now} cannot go on from"
            raise CheckpointError(f'{text}, also not with resume="force" (--force): start anew elsewhere') from error

    def continue_from(self, meta: dict[str, Any], carry: Carry) -> Carry:
        """Take up what was measured so far; return the carry without it."""
        self.history = History.of(meta["history"], self.history.directions)
        self.ledger = Ledger.of(meta["ledger"])
        self.seconds, self.devices = float(meta["seconds"]), int(meta.get("devices", 1) or 0) or None
        self.losses = {
            str(name): [np.asarray(one, float).tolist() for one in values] for name, values in meta["losses"].items()
        }
        self.began = {str(name): float(value) for name, value in meta.get("began", {}).items()}
        if carry.best is not None:
            round, column, value = meta["best"]
            x, y = (join(part, fixed) for part, fixed in zip(carry.best, self.evaluation.fixed, strict=True))
            self.best = Best(x, y, int(round), str(column), float(value))
        self.gave_up = str(meta.get("gave_up", ""))
        for _ in range(int(meta.get("halvings", 0))):
            self.halvings, self.algorithm = self.halvings + 1, halved(self.algorithm)
        return carry._replace(best=None)

    def compare(self, meta: dict[str, Any], force: bool) -> None:
        """Refuse the checkpoint of another run, naming what differs; or warn of it."""
        path = self.plan.path
        if "fingerprint" not in meta:
            raise CheckpointError(f"{path} does not say what its run was begun with: an earlier version has written it")
        require_object(meta["fingerprint"], "what the run was begun with")
        before = Fingerprint(**meta["fingerprint"])
        differences = self.plan.begun.differences(before)
        accounted = "privacy.noise_multiplier is" in differences  # clients count replies, all under one
        if differences and (accounted or not force):
            raise CheckpointError(f"{path} belongs to another run: {differences}{'' if accounted else f'; {FORCE}'}")
        if differences:
            _warn(self.group, f"{path} is continued with other arguments: {differences}")
        if before.versions != self.plan.begun.versions:
            versions = f"{path} was written by {before.versions}, and is continued by {self.plan.begun.versions}"
            _warn(self.group, f"{versions}: numbers may differ, and losses and schedules are not compared")


def _warn(group: ProcessGroup, text: str) -> None:
    """Warn; where there are several processes, process 0 alone does."""
    if group.is_first:
        warn(CheckpointWarning(text))
