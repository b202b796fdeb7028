"""Run a list of checks one after the other, and show their outcomes as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fedbilevel.core.card import aligned
from fedbilevel.core.errors import CheckError, FedbilevelError
from fedbilevel.core.facts import No
from fedbilevel.wording import in_a_line

LONGEST = 400  # the largest number of characters of an error in the table

NamedCheck = tuple[str, Callable[[], str | No] | No]
"""The name of a check; and either its function, which returns a detail or raises an error, or why nothing is checked.

A function returns "" if a feature is supported according to the method's declaration, and nothing was run. It returns
`No` with the reason if a run was refused."""


@dataclass(frozen=True)
class CheckOutcome:
    """Hold the outcome of one check.

    Args:
        name: what was checked.
        outcome: "passed"; "failed"; "refused" if there is nothing to check, for example because the method does not
            support a feature; or "allowed" if the method declares that it supports a feature, and nothing was run.
        detail: the largest difference, the reason of a refusal, or the error.
        error: the error of a check that failed.
    """

    name: str
    outcome: str
    detail: str = ""
    error: Exception | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, repr=False)
class CheckReport:
    """Hold the outcomes of several checks; it prints as a table.

    Args:
        subject: what was checked: the label of a method, or the name of a task.
        checks: the outcomes, in the order in which they were found.
    """

    subject: str
    checks: tuple[CheckOutcome, ...]

    @property
    def failed(self) -> tuple[CheckOutcome, ...]:
        """Return the checks that failed."""
        return tuple(check for check in self.checks if check.outcome == "failed")

    def __repr__(self) -> str:
        rows = [(check.name, check.outcome, check.detail) for check in self.checks]
        return aligned([(self.subject, "", ""), *rows])


def report_of(subject: str, checks: Iterable[NamedCheck]) -> CheckReport:
    """Run all checks, and return their report.

    Raises:
        CheckError: a check failed. Its message is the report, and its cause is the error of the first such check.
    """
    report = CheckReport(subject, tuple(outcome(*check) for check in checks))
    if report.failed:
        text = f"{len(report.failed)} of {len(report.checks)} checks failed\n{report!r}"
        raise CheckError(text) from report.failed[0].error
    return report


def outcome(name: str, check: Callable[[], str | No] | No) -> CheckOutcome:
    """Run one check and return its outcome; an error of any class is a failure, and does not end other checks."""
    if isinstance(check, No):
        return CheckOutcome(name, "refused", check.why)
    try:
        detail = check()
    except FedbilevelError as error:
        return CheckOutcome(name, "failed", in_a_line(error, LONGEST), error)
    except Exception as error:  # noqa: BLE001 - the code that is checked may raise anything
        return CheckOutcome(name, "failed", f"{type(error).__name__}: {in_a_line(error, LONGEST)}", error)
    if isinstance(detail, No):
        return CheckOutcome(name, "refused", detail.why)
    return CheckOutcome(name, "passed" if detail else "allowed", detail)
