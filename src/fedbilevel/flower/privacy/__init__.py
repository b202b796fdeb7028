"""Differential privacy at a client: clipping, noise, and the account of what has left it."""

from fedbilevel.flower.privacy.accounting import BudgetSpentError, PrivacyAccount
from fedbilevel.flower.privacy.mechanism import NoiseError, Privacy, load_secret

__all__ = ["BudgetSpentError", "NoiseError", "Privacy", "PrivacyAccount", "load_secret"]
