"""Fit models to tables of several sites, with scikit-learn's interface, and find penalties by cross-validation.

An estimator's `fit` simulates the federation on this machine, so it needs the rows of all sites in one place. A `Study`
gives the same coefficients, and also runs over Flower with sites that keep their tables (docs/how-to/study.md).
"""

from importlib.util import find_spec

from fedbilevel.errors import ConfigurationError
from fedbilevel.extending import missing

if find_spec("sklearn") is None:
    raise ConfigurationError(f"estimators need {missing('scikit-learn', 'tables')}")

from fedbilevel.estimators.linear import LogisticRegression, Ridge
from fedbilevel.estimators.preparer import Preparer
from fedbilevel.estimators.study import Study, StudyModel
from fedbilevel.estimators.survival import CoxRegression

__all__ = ["CoxRegression", "LogisticRegression", "Preparer", "Ridge", "Study", "StudyModel"]
