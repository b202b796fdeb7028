"""Check the losses, the samples and the start of a task before a method runs on it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import jax
import numpy as np

from fedbilevel.core.errors import CheckError, InfluenceWarning, NumericalWarning, warn
from fedbilevel.core.tree import join, nonfinite_leaves
from fedbilevel.diagnostics.measure import DifferentiablePoint, point
from fedbilevel.diagnostics.report import CheckReport, NamedCheck, report_of
from fedbilevel.oracles.operators import extreme_eigenvalues
from fedbilevel.oracles.population import Population
from fedbilevel.tasks.task import Task

LANCZOS_STEPS = 50


def check_task(task: Task) -> CheckReport:
    """Check a task's losses, samples and start for mistakes that would lead to plausible but wrong results.

    These checks are made:

    - x acts on the outer loss through y, and every leaf of x moves; otherwise losses may have been swapped.
    - Each loss is a mean over the samples of its batch, and not a sum.
    - Both losses, their gradients and the metrics are finite at the start.
    - The inner loss is strongly convex in y at the start. If not, a warning is issued and no check fails, since y may
      move to a region where the loss is strongly convex.

    A warning is also issued if a loss uses samples as indices outside of an axis, such as negative labels.

    Everything is computed in float64, whatever the dtypes of x, y and the samples are.

    Args:
        task: the task; its problem is a Bilevel, Minimax or Compositional problem, and its samples are on this machine.

    Returns:
        The report, in which no check failed.

    Raises:
        CheckError: a check failed. Its message is the report.
        ConfigurationError: a loss cannot be evaluated, for example because shapes do not fit; or the start or a sample
            is not finite.
    """
    with jax.enable_x64(True):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            at = point(task.problem, task.population, task.x0, task.y0)
        found = [warning.message for warning in seen if isinstance(warning.message, Warning)]
        for other in found:
            if not isinstance(other, InfluenceWarning | NumericalWarning):
                warn(other)  # a warning that belongs to no check, for example about negative labels
        return report_of(task.name, checks(task, at, found))


def checks(task: Task, at: DifferentiablePoint, seen: list[Warning]) -> Iterator[NamedCheck]:
    """Yield all checks of a task; `seen` are the warnings of the first look at its losses."""
    population = Population.of(at.problem, task.population)
    yield "x acts on the outer loss through y", lambda: without(InfluenceWarning, seen)
    yield "losses are means over samples", lambda: without(NumericalWarning, seen)
    yield "losses and gradients are finite", lambda: finite(population, at)
    yield "the inner loss is strongly convex at the start", lambda: curvature(population, at)
    yield "metrics are finite", lambda: measured(task, at)


def without(kind: type[Warning], seen: list[Warning]) -> str:
    """Check that no warning of the class `kind` is among `seen`, the warnings of the first look at the losses."""
    if found := [str(warning) for warning in seen if isinstance(warning, kind)]:
        raise CheckError("; ".join(found))
    return "as seen near the start"


def finite(population: Population, at: DifferentiablePoint) -> str:
    """Check the values and the gradients of both losses over all samples."""
    losses = {"outer": population.outer.value(at.x, at.y), "inner": population.inner.value(at.x, at.y)}
    if wrong := [f"the {name} loss is {float(value)}" for name, value in losses.items() if not np.isfinite(value)]:
        raise CheckError(", ".join(wrong))
    found = {"outer": population.outer.gradients(at.x, at.y), "inner": population.inner.gradients(at.x, at.y)}
    named = {name: dict(zip(("x", "y"), gradients, strict=True)) for name, gradients in found.items()}
    if bad := nonfinite_leaves(named):
        raise CheckError(f"the gradients contain NaN or infinity: {', '.join(bad)}")
    sizes = [max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(pair)) for pair in found.values()]
    return f"the largest entry of a gradient is {sizes[0]:.2g} for the outer loss and {sizes[1]:.2g} for the inner loss"


def curvature(population: Population, at: DifferentiablePoint) -> str:
    """Measure the extreme eigenvalues of the inner Hessian, and warn if the smallest is not positive."""
    spectrum = extreme_eigenvalues(
        lambda v: population.inner.hess_v(at.x, at.y, v), at.y, seed=0, iterations=LANCZOS_STEPS
    )
    found = f"eigenvalues from {spectrum.smallest:.2g} to {spectrum.largest:.2g}"
    if spectrum.smallest <= 1e-12 * max(abs(spectrum.largest), 1e-300):
        text = f"the inner loss is not strongly convex in y at the start: its Hessian has {found}"
        warn(NumericalWarning(f"{text}; a ridge on the inner loss in y makes y*(x) unique"))
        return f"no: {found}"
    return found


def measured(task: Task, at: DifferentiablePoint) -> str:
    """Check that each metric is a finite number at the start."""
    start = join(at.x, at.x_fixed), join(at.y, at.y_fixed)
    values = {name: np.asarray(metric(*start)) for name, metric in task.metrics.items()}
    wrong = [name for name, value in values.items() if value.shape != () or not np.isfinite(value)]
    if wrong:
        raise CheckError(f"at the start these are not finite numbers: {', '.join(wrong)}")
    return ", ".join(f"{name} {float(value):.3g}" for name, value in values.items()) or "there are none"
