"""Names of earlier versions and what stands in their place; for error messages, and for reading what they saved."""

from collections.abc import Mapping
from typing import Any

ERRORS = (
    "AbsenceWarning",
    "CapacityWarning",
    "CheckpointError",
    "CheckpointWarning",
    "ConfigurationError",
    "ExchangeError",
    "FedbilevelError",
    "InfluenceWarning",
    "NonFiniteError",
    "NumericalError",
    "NumericalWarning",
)
AUTHORING = (
    "ALGORITHMS",
    "Algorithm",
    "Client",
    "Fed",
    "Reply",
    "phase",
    "static",
    "positive",
    "fraction",
    "steps",
    "Public",
    "Withheld",
    "Plain",
    "History",
    "Ledger",
    "Diagnosis",
    "HypergradientReport",
)

PUBLIC = {
    "algorithm": "a method is a subclass of fedbilevel.authoring.Algorithm, without a decorator",
    "load_result": "fedbilevel.Result.load",
    **{name: f"fedbilevel.errors.{name}" for name in ERRORS},
    **{name: f"fedbilevel.authoring.{name}" for name in AUTHORING},
}
"""Names that `fedbilevel` once handed out."""

FIELDS = {
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

COLUMNS = {"products": "hvps"}
"""Columns of histories and totals of ledgers that earlier versions saved under another name; they are read as ever."""


def with_names_of_today(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved row or ledger with the columns' names of today; what has a name of today keeps it."""
    return {name if COLUMNS.get(name, name) in saved else COLUMNS[name]: value for name, value in saved.items()}
