"""Federated bilevel optimization: choose x so that the model y trained on it, by many clients, is best."""

__version__ = "0.1.0"
