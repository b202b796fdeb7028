"""Drive a run from the host: run stretches of rounds, with rows, callbacks, signals and checkpoints between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedbilevel.algorithms.parts.layers import layers_at
from fedbilevel.core import interrupts
from fedbilevel.core.errors import ExchangeError, NonFiniteError, NumericalError
from fedbilevel.core.own_y import own_paths
from fedbilevel.core.tree import join, split
from fedbilevel.display import Display, Silent
from fedbilevel.engines.ends import Spent, comparable
from fedbilevel.engines.engine import Carry
from fedbilevel.engines.execution import Execution
from fedbilevel.engines.history import Callback, Result, Row
from fedbilevel.engines.measurements import Compare, RunMeasurements
from fedbilevel.engines.process_group import LostProcess, current_group
from fedbilevel.engines.rescue import Rescue
from fedbilevel.engines.saver import Saver

STRETCH_SECONDS = 0.5  # seconds of rounds between two times at which callbacks are called and signals are handled


@dataclass(frozen=True)
class LoopPlan:
    """Hold the numbers of rounds after which a run evaluates, saves and ends."""

    rounds: int
    eval_every: int
    save_every: int | None  # None: by the clock

    def until_next_stop(self, round: int) -> int:
        """Return the number of rounds to the next row, checkpoint or end."""
        stops = [every - round % every for every in (self.eval_every, self.save_every) if every]
        return min(self.rounds - round, *stops)

    def row_is_due(self, round: int) -> bool:
        """Return whether to evaluate after this round."""
        return round % self.eval_every == 0 or round == self.rounds

    def save_is_due(self, round: int, by_clock: bool) -> bool:
        """Return whether to save after this round."""
        due = by_clock if self.save_every is None else round % self.save_every == 0
        return due or round == self.rounds


@dataclass
class Loop:
    """Drive a run: hold its current carry, and the objects that execute, measure, save and rescue the run."""

    plan: LoopPlan
    execution: Execution
    measurements: RunMeasurements
    saver: Saver
    rescue: Rescue
    callbacks: Sequence[Callback]
    display: Display = field(default_factory=Silent)  # shows the progress
    carry: Carry = field(init=False)
    result: Result = field(init=False)  # the result at the current carry
    speed: float = 0.0  # rounds per second; 0 before the first stretch

    def play(self, carry: Carry) -> Result:
        """Run from the state `carry` to the last round, or until the method, a callback or a signal ends the run."""
        self.execution.start(carry)
        try:
            self.carry, self.result = carry, self.snapshot(carry)
            return self.play_on()
        except NumericalError as error:
            error.ledger = self.measurements.total(error.costs)
            raise
        finally:
            self.execution.close()

    def play_on(self) -> Result:
        """Run from the current carry to the end."""
        reason, stop = self.rescue.gave_up or self.execution.ending(self.result.state), False
        self.display.advance(self.result.round, self.plan.rounds)
        with interrupts.held() as signals:
            if rows := self.measurements.history.rows:
                self.keep_safe(rows[-1])
            else:
                given, stop = self.begin(bool(signals))
                reason = reason or given
            while self.result.round < self.plan.rounds and not reason and not stop:
                reason, stop = self.turn(signals)
        if stop:
            interrupts.end(signals, self.saver.left_off(self.result.round, self.plan.rounds))
        return self.ended(reason)

    def begin(self, interrupted: bool) -> tuple[str, bool]:
        """Measure and save the start, and call the callbacks.

        Returns:
            The reason why the run ends here, or ""; and whether a signal such as Ctrl-C stops it at once.
        """
        row = self.add_row()
        self.keep_safe(row)
        self.saver.save(*self.checkpoint(self.carry))  # from here on, the run can be resumed
        reason, stop, _ = self.agree(row, interrupted)
        return reason, stop

    def turn(self, signals: list[int]) -> tuple[str, bool]:
        """Run some rounds without a pause (a stretch), call the callbacks and save the run.

        If the run diverges, return to a better row instead.

        Returns:
            The reason why the run has ended, or ""; and whether a signal such as Ctrl-C stops it, to be resumed later.
        """
        try:
            row, end = self.stretch()
            if row and self.rescue.growth and self.rescue.halvings_at_most:
                row, end = None, self.go_back(self.rescue.growth)
                if not end:
                    return "", False
            self.rescue.warn_of_growth(self.result, self.execution.method, once=True)
        except LostProcess:
            raise  # the stretch has consumed the carry
        except (ExchangeError, NonFiniteError) as error:
            rows = len(self.measurements.history.rows)
            if isinstance(error, NonFiniteError) and self.rescue.may_return(rows, self.result):
                self.measurements.ledger = self.measurements.total(error.costs)
                if end := self.go_back(str(error)):
                    self.saver.save(*self.checkpoint(self.carry))
                return end, False
            self.fail(error)
            raise
        self.keep_safe(row)
        reason, stop, due = self.agree(row, bool(signals))
        reason = end or reason
        if due or reason or stop:
            self.saver.save(*self.checkpoint(self.carry))
        return reason, stop

    def stretch(self) -> tuple[Row | None, str]:
        """Run some rounds, at most to the next row, checkpoint or end.

        Returns:
            The new row, or None if no row is due; and the reason why the run ends here, or "".
        """
        rounds = min(max(1, int(self.speed * STRETCH_SECONDS)), self.plan.until_next_stop(self.result.round))
        stretch, seconds, spent = self.execution.advance(self.carry, rounds)
        self.measurements.note(stretch, seconds)
        self.carry, self.speed = stretch.carry, stretch.rounds / max(seconds, 1e-9)
        self.result = self.snapshot(self.carry)
        round = self.result.round
        self.display.advance(round, self.plan.rounds)
        end = spent or self.execution.ending(self.result.state)
        new = round > self.measurements.history.rows[-1]["round"]  # False if the budget allowed no further round
        return self.add_row() if new and (end or self.plan.row_is_due(round)) else None, end

    def snapshot(self, carry: Carry) -> Result:
        """Return the result of the run at a carry."""
        x, y, state = self.execution.point(carry)
        x_fixed, y_fixed = self.execution.posed.fixed
        return Result(
            x=join(x, x_fixed),
            y=join(y, y_fixed),
            round=int(carry.round),
            rounds=self.plan.rounds,
            history=self.measurements.history,
            ledger=self.measurements.ledger,
            compile_seconds=self.execution.run.compile_seconds,
            best=self.measurements.best,
            state=state,
            own_leaves=own_paths(self.execution.posed.problem.own, self.execution.posed.y),
        )

    def add_row(self) -> Row:
        """Add a row with measurements at the current carry, and check whether the run diverges."""
        findings = self.execution.method.findings(self.result.state).columns
        measured = self.measurements
        row = measured.add_row(self.result, findings, self.execution.per_client)
        if self.rescue.halvings:
            row["halvings"] = self.rescue.halvings
        self.rescue.watch(measured.history, measured.losses, measured.began, self.result)
        measured.close_row(self.result, row)
        return row

    def keep_safe(self, row: Row | None) -> None:
        """Keep a copy of the run's state if there is a new row, so that the run can return to this state."""
        if row is not None:
            best = self.measurements.best
            self.rescue.keep(self.carry, is_best=best is not None and best.round == row["round"])

    def go_back(self, why: str) -> str:
        """Go back to the carry before the best row, with half of every step size.

        If the steps were already halved as often as allowed, the run ends there.

        Returns:
            Why the run ends; "" if it goes on.
        """
        carry = self.rescue.retreat(why, self.result, self.execution.method)
        self.forget_after(carry)
        if not self.rescue.gave_up:
            self.execution.restart(carry)
        self.carry, self.result = carry, self.snapshot(carry)
        return self.rescue.gave_up

    def forget_after(self, carry: Carry) -> None:
        """Remove the rows of rounds after a carry: the run returns to it, or saves it as the last good carry."""
        if int(carry.round) < self.result.round:
            self.measurements.forget_after(int(carry.round))

    def fail(self, error: ExchangeError | NonFiniteError) -> None:
        """Save the last good carry, if there is one, before an error ends the run; add advice to the error."""
        good = getattr(error, "carry", None) or (self.carry if isinstance(error, ExchangeError) else None)
        if isinstance(error, NonFiniteError):
            error.result = self.result if good is None else self.snapshot(good)
        if good is not None:
            self.forget_after(good)
            diverged = isinstance(error, NonFiniteError)
            self.saver.save_before(error, *self.checkpoint(good, diverged))
        if isinstance(error, NonFiniteError) and error.of_iterate:
            self.rescue.explain(error, self.execution.method)

    def agree(self, row: Row | None, interrupted: bool) -> tuple[str, bool, bool]:
        """Call the callbacks, and make all processes agree on whether the run ends.

        Process 0 calls the callbacks and decides, and a signal to any process stops all of them. If a callback raises
        an error, all processes save before they raise it.

        Returns:
            The reason to end, or ""; whether to stop at once; and whether to save.
        """

        def here() -> tuple[str, float, bool]:
            reasons = [callback(self.result, row) for callback in self.callbacks]  # calls all, even after a reason
            due = self.plan.save_is_due(self.result.round, self.saver.is_due)
            return next((str(reason) for reason in reasons if reason), ""), self.speed, due

        group = current_group()
        try:
            reason, self.speed, due = group.decide(here)
            return reason, any(group.gather(interrupted)), due
        except LostProcess:
            raise
        except Exception as error:  # raised by a callback
            self.saver.save_before(error, *self.checkpoint(self.carry))
            raise

    def checkpoint(self, carry: Carry, diverged: bool = False) -> tuple[Carry, dict[str, Any]]:
        """Return the contents of a checkpoint: a carry with the best row, and a JSON object.

        `diverged` says whether the run ends because it diverges.
        """
        best = self.measurements.best
        if best is not None:
            carry = carry._replace(best=(split(best.x)[0], split(best.y)[0]))
        meta = {
            **self.measurements.to_json(),
            **self.rescue.to_json(diverged),
            "devices": self.execution.devices,
            "best": best and best[2:],
        }
        return carry, meta

    def ended(self, reason: str) -> Result:
        """Return the result of a run that ends at the current carry, with remarks about its end."""
        method, result, posed = self.execution.method, self.result, self.execution.posed
        self.rescue.warn_of_growth(result, method)
        remarks: tuple[str, ...] = ()
        if not self.rescue.gave_up:
            end, spent = (result.x, result.y), Spent(result.ledger.gradients, method.batch_size)
            layers = layers_at(method)
            hidden = any(layer.hides_losses for layer in layers)  # remarks would reveal them without noise
            ends: Compare = partial(posed.ends, end=end, spent=spent)
            if hidden or self.saver.other_arguments:  # a run that was continued by force may have had another start
                ends = lambda before: None  # noqa: E731
            advice = self.rescue.advice(result, method)
            tells = self.measurements.judged_by != "outer_loss" or comparable(posed.problem)
            of_ends = self.measurements.remark(result, advice, ends) if tells else ""
            by_mean = not any(layer.place == "rule" for layer in layers)  # with a rule, y has another limit
            uneven = posed.uneven(end, spent) if by_mean and not hidden else ""
            remarks = of_ends, uneven, *method.remarks(result.state)
        return replace(result, stopped=reason, remarks=tuple(filter(None, remarks)))
