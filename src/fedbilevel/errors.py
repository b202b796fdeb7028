"""Errors and warnings that the library raises on purpose, one class for each kind."""

from fedbilevel.core.errors import (
    AbsenceWarning,
    CapacityWarning,
    CheckpointError,
    CheckpointWarning,
    ConfigurationError,
    ExchangeError,
    FedbilevelError,
    FloorError,
    InfluenceWarning,
    InUse,
    NonFiniteError,
    NumericalError,
    NumericalWarning,
)

__all__ = [
    "AbsenceWarning",
    "CapacityWarning",
    "CheckpointError",
    "CheckpointWarning",
    "ConfigurationError",
    "ExchangeError",
    "FedbilevelError",
    "FloorError",
    "InUse",
    "InfluenceWarning",
    "NonFiniteError",
    "NumericalError",
    "NumericalWarning",
]
