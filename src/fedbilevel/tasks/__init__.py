"""Problems that are ready to run, most of them from papers."""

from collections.abc import Callable

from fedbilevel.tasks.classification import classification
from fedbilevel.tasks.client_weights import client_weights
from fedbilevel.tasks.compositional import compositional
from fedbilevel.tasks.fair_classification import fair_classification
from fedbilevel.tasks.few_shot import few_shot
from fedbilevel.tasks.hospitals import hospitals
from fedbilevel.tasks.hyper_cleaning import hyper_cleaning
from fedbilevel.tasks.hyper_representation import hyper_representation
from fedbilevel.tasks.location import location
from fedbilevel.tasks.loss_tuning import loss_tuning
from fedbilevel.tasks.portfolio import portfolio
from fedbilevel.tasks.quadratic import quadratic
from fedbilevel.tasks.regularization import regularization
from fedbilevel.tasks.saddle import saddle
from fedbilevel.tasks.selection import selection
from fedbilevel.tasks.tables import tables
from fedbilevel.tasks.task import Task

TASKS: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "client_weights": client_weights,
    "compositional": compositional,
    "fair_classification": fair_classification,
    "few_shot": few_shot,
    "hospitals": hospitals,
    "hyper_cleaning": hyper_cleaning,
    "hyper_representation": hyper_representation,
    "location": location,
    "loss_tuning": loss_tuning,
    "portfolio": portfolio,
    "quadratic": quadratic,
    "regularization": regularization,
    "saddle": saddle,
    "selection": selection,
    "tables": tables,
}
"""The functions that make tasks, by the names of the tasks on the command line."""

MEASURED_PER_CLIENT = (
    "classification",
    "client_weights",
    "hospitals",
    "hyper_cleaning",
    "hyper_representation",
    "loss_tuning",
    "tables",
)
"""The names of the tasks that have `metrics_per_client`."""

__all__ = ["MEASURED_PER_CLIENT", "TASKS", "Task", *sorted(TASKS)]
