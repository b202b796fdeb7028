"""What the library raises and warns of on purpose, one class for each kind."""

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
    "InfluenceWarning",
    "NonFiniteError",
    "NumericalError",
    "NumericalWarning",
]
