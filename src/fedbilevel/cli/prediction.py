"""Define `fedbilevel predict`, which predicts the rows of a site's own table with the model of a study."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedbilevel.cli import shared
from fedbilevel.core.errors import require
from fedbilevel.core.writing import write_text
from fedbilevel.wording import printable


def add_to(add: shared.Add) -> None:
    command = add("predict", _predict)
    command.add_argument("model", type=Path, metavar="MODEL.json", help="the model that a study has written")
    command.add_argument(
        "table", type=Path, metavar="TABLE", help="a .csv, .tsv or .parquet file with the rows to predict"
    )
    site = "the site of the rows (a hospital that was not in the study, whose offset is 0)"
    command.add_argument("--site", default="", metavar="NAME", help=site)
    command.add_argument("--out", type=Path, metavar="FILE", help="write a CSV file (standard output)")


def _predict(options: argparse.Namespace) -> int:
    """Predict each row of a site's table with the model of a study.

    The table must have the columns of the study, with the same words, units and marks of gaps. Other columns are
    ignored. The predictions are CSV with the columns

      row                    the number of the row in the table, from 1 on
      probability, class     logistic regression: the probability of the positive class, and the more probable class
      number                 ridge regression: the predicted number
      log_hazard             Cox's model: the log hazard above the baseline of the row's site
    """
    if options.out is not None:
        same = options.out.resolve() in (options.model.resolve(), options.table.resolve())
        require(not same, "--out", str(options.out), "a file other than the model and the table")
    from fedbilevel.data.table_files import read_table
    from fedbilevel.estimators import StudyModel
    from fedbilevel.estimators.model_in_use import predictions

    model = StudyModel.load(options.model)
    study = model.agreement.study
    frame = predictions(model, read_table(options.table, study.gaps), options.site)
    if study.estimator == "logistic":
        shared.fail(shared.OK, f"the probabilities are those of {study.target} = {model.estimator.classes_[1]}")
    if study.offsets and not options.site:
        sites = ", ".join(study.fitted_sites)
        shared.fail(shared.OK, f"without --site, the rows count as rows of a site that was not in the study ({sites})")
    text = frame.to_csv(index=False, lineterminator="\n")
    if options.out is None:
        sys.stdout.write(printable(text, None, kept=shared.LINES))
    else:
        write_text(options.out, text)
    return shared.OK
