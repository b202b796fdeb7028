"""Names of earlier versions and what stands in their place; for error messages, and for reading what they saved."""

from collections.abc import Iterable, Mapping
from typing import Any

PUBLIC = {
    "algorithm": "a method is a subclass of fedbilevel.authoring.Algorithm, without a decorator",
    "load_result": "fedbilevel.Result.load",
    "steps": "fedbilevel.authoring.step_sizes",
}
"""Names that `fedbilevel` once handed out, and that no public module has now."""

_INNER = "a field of the part inner"
_SOLVER = "a field of the part hypergradient.solver"
FIELDS = {
    "coefficients": "local_optimizer",
    "inner_rounds": f"rounds, {_INNER}",
    "inner_server_lr": f"server_lr, {_INNER}",
    "system_lr": "lr, a field of the part hypergradient = SystemSteps(…)",
    "inverse": "the part hypergradient.solver, Neumann(…) or CG(…)",
    "neumann_terms": f"terms, {_SOLVER}",
    "neumann_step": f"step, {_SOLVER}",
    "cg_iterations": f"max_steps, {_SOLVER} = CG(…)",
    "cg_tolerance": f"tolerance, {_SOLVER} = CG(…)",
    "fresh_cohorts": "a field of the part hypergradient = Implicit(…)",
    "paired": "a field of the part hypergradient = LocalImplicit(…)",
    "estimator": "the part hypergradient: Coordinates(…) or PrintedSlopes(…)",
    "coordinates": "count, a field of the part hypergradient = Coordinates(…)",
    "first": "wait_for, of the wrapper Asynchronous (in a spec asynchronous.wait_for) and of ADBO",
    "max_staleness": "a field of the wrapper Asynchronous (in a spec asynchronous.max_staleness) and of ADBO",
    "delay_penalty": "a field of the wrapper Asynchronous (in a spec asynchronous.delay_penalty)",
    **dict.fromkeys(
        ("policy", "pruned", "fixed", "min_coverage"),
        "a field of the wrapper Submodels (in a spec a field of [submodels])",
    ),
    "own_x": "local of the problem, Bilevel(outer, inner, local='x'), and of the task hyper_cleaning (task.local=x)",
}
"""Fields of methods that have another name or place now."""

FIELDS_OF_PARTS = {
    "inner_lr": f"lr, {_INNER}",
    "local_steps": _INNER,
    "client_lr": f"{_INNER} = MeanGradient(…)",
    "perturbation": "a field of the part hypergradient.second_order = Differences(…)",
}
"""The same for methods with a part `inner`; other methods have fields of these names today."""


def name_of_today(field: str, allowed: Iterable[str]) -> str:
    """What a field of earlier versions is now, for a class that has the fields `allowed`; empty if there was none."""
    return FIELDS.get(field) or (FIELDS_OF_PARTS.get(field, "") if "inner" in set(allowed) else "")


COLUMNS = {"products": "hvps"}
"""Columns of histories and totals of ledgers that earlier versions saved under another name; they are read as ever."""


def with_names_of_today(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved row or ledger with the columns' names of today; what has a name of today keeps it."""
    return {name if COLUMNS.get(name, name) in saved else COLUMNS[name]: value for name, value in saved.items()}
