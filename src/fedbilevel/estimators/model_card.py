"""Write a model card in Markdown, which says what readers should know about a study's model."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Self

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.authoring import Ledger
from fedbilevel.data.columns import deviation
from fedbilevel.extending import printable

MODELS = {
    "logistic": "logistic regression",
    "ridge": "linear regression with a ridge penalty",
    "cox": "Cox's proportional hazards, with a baseline of its own for each site",
}
NO_NOISE = "none: no noise was added to the sites' messages, so no ε bounds what they reveal"  # true of every study
NOT_FOR = (
    "Decisions about a patient without a person who knows the patient; the model has no approval as a medical device.",
    "Conclusions about causes: a coefficient says how a column and the target vary together, given the other columns.",
    "Rows that differ from those of these sites in units, in codes, or in the group of patients.",
    "Sites that were not in the study, before it has been measured there.",
)


@dataclass(frozen=True, kw_only=True)
class StudyCosts:
    """The costs of a study, for its model card.

    Args:
        exchanges: the number of exchanges with the sites.
        requests: the number of messages to sites.
        bytes_down, bytes_up: bytes to and from all sites together.
        simulated: whether the exchanges were simulated on one machine. A simulation needs no messages to add up
            statistics and to evaluate the model, so these are not counted.
    """

    exchanges: int
    requests: int
    bytes_down: int
    bytes_up: int
    simulated: bool = False

    @classmethod
    def of(cls, ledgers: Sequence[Ledger]) -> Self:
        """Add up the costs of simulated runs. In a simulation, every message has a reply."""
        counts = {name: sum(getattr(one, name) for one in ledgers) for name in ("exchanges", "bytes_down", "bytes_up")}
        return cls(**counts, requests=sum(one.replies for one in ledgers), simulated=True)

    def __str__(self) -> str:
        how = "to fit the model, simulated on one machine" if self.simulated else "in all attempts in this folder"
        exchanges = f"{self.exchanges:,} exchanges {how}: {self.requests:,} requests to sites"
        return f"{exchanges}, {self.bytes_down:,} bytes to them and {self.bytes_up:,} bytes from them"


def card(model: Any) -> str:
    """Return the model card of a `StudyModel`: see `StudyModel.card`."""
    agreed, study = model.agreement, model.agreement.study
    what = {"logistic": "the probability of", "ridge": "the number", "cox": "the log hazard of the event"}
    target = study.event or study.target
    facts = {"Predicts": f"{what[study.estimator]} {_code(target)}"}
    if study.estimator == "logistic":
        positive, other = _code(model.estimator.classes_[1]), _code(model.estimator.classes_[0])
        facts |= {
            "Predicts": f"{facts['Predicts']} = {positive}",
            "Positive class": f"{positive}; the other is {other}",
        }
    facts |= {"Model": MODELS[study.estimator], "Sites": ", ".join(map(_code, study.fitted_sites))}
    held = f"; {held_out_in_words(study)}" * bool(study.holdout)
    facts |= {"Rows": f"{agreed.rows} from all sites, to which the model is fitted{held}"}
    facts |= {"Penalty": f"{_penalties(model)}, by {study.cv}-fold cross-validation"}
    costs = model.costs
    facts |= {"Costs": "not stored with the model"} if costs is None else {"Costs": str(costs)}
    facts |= {"Differential privacy": NO_NOISE}
    facts |= {"Versions": f"fedbilevel {fb.__version__}, JAX {jax.__version__}, NumPy {np.__version__}"}
    facts |= {"Date of this card": date.today().isoformat()}
    columns = [f"- {_code(name)}: {_described(summary)}" for name, summary in agreed.features.items()]
    report = ["There is no report with this model."]
    if model.report is not None:
        # The report is indented, which marks it as code. A name in the report could close a fence.
        report = [f"    {line}" for line in printable(str(model.report), None, kept="\n").split("\n")]
    parts = {
        f"Model of {_code(target)}": [f"- {name}: {text}" for name, text in facts.items()],
        "Columns": columns,
        "How good it is": report,
        "What it is not for": [f"- {line}" for line in NOT_FOR],
    }
    lines = [
        ["#" * min(number, 2) + f" {title}", "", *inside, ""] for number, (title, inside) in enumerate(parts.items(), 1)
    ]
    return "\n".join(line for part in lines for line in part)


def held_out_in_words(study: Any) -> str:
    """Say in words which rows are held out."""
    if isinstance(study.holdout, str):
        return f"all rows of {_code(study.holdout)} are held out and not counted here"
    return f"{study.holdout:.0%} of each site's rows are held out and not counted here"


def _code(text: Any) -> str:
    """Return a name as code in Markdown, so that all its characters are shown."""
    return f"`{printable(str(text)).replace('`', chr(39))}`"


def _penalties(model: Any) -> str:
    """Write the penalty of each group of features: one number, or the least and the greatest in the group."""
    groups = np.array(model.agreement.penalty_groups())
    values = np.asarray(model.estimator.penalties_, float)
    said = []
    for name in dict.fromkeys(groups):
        least, most = values[groups == name].min(), values[groups == name].max()
        said.append(f"{_code(name)} {least:.3g}" + f" to {most:.3g}" * bool(least < most))
    return f"λ for standardised columns: {', '.join(said)}"


def _described(summary: Any) -> str:
    """Describe the statistics of a column, summed over all sites."""
    if summary.get("categories"):
        rows = ", ".join(f"{_code(name)} {count}" for name, count in summary["categories"].items())
        return f"rows of {rows}" + ", and of rarer categories" * summary["rarer"]
    if summary.get("rarer"):
        return "at each site, every category has too few rows to be named; it is not used"
    if not summary.get("count"):
        return "nothing is known of it, and it is not used"
    return f"{summary['count']} numbers, mean {summary['mean']:.5g}, standard deviation {deviation(summary):.5g}"
