"""The model card has the numbers of the study that it describes."""

import numpy as np
import pytest

from fedbilevel.authoring import Ledger
from fedbilevel.errors import DataWarning
from fedbilevel.estimators import StudyModel
from fedbilevel.estimators.model_card import StudyCosts
from site_tables import study, tables


def test_a_card_has_the_facts_of_the_study_and_its_report(tmp_path):
    frames = tables()
    fitted = study("logistic", holdout=0.3, positive="no").fit(frames)
    fitted.save(tmp_path / "model.json")
    card, loaded = fitted.card(), StudyModel.load(tmp_path / "model.json").card()
    lines = card.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# Model of `ill`",
        "## Columns",
        "## How good it is",
        "## What it is not for",
    ]
    assert "- Predicts: the probability of `ill` = `no`" in lines
    assert "- Positive class: `no`; the other is `yes`" in lines
    assert "- Sites: `north`, `south`, `west`" in lines
    rows = int(next(line for line in lines if line.startswith("- Rows: ")).split()[2])
    assert rows == fitted.agreement.rows < sum(map(len, frames.values()))
    told = fitted.agreement.features["age"]
    deviation = np.sqrt(told["squares"] / told["count"])
    assert f"- `age`: {told['count']} numbers, mean {told['mean']:.5g}, standard deviation {deviation:.5g}" in lines
    assert any(line.startswith("- `kind`: rows of `a` ") for line in lines)
    site = fitted.estimator.penalties_[fitted.agreement.names.index("site_north")]
    penalty = next(line for line in lines if line.startswith("- Penalty: "))
    assert "`site` " in penalty
    assert f"{site:.3g}" in penalty
    (ledger,) = fitted.estimator.ledgers_
    sent = f"{ledger.bytes_down:,} bytes to them and {ledger.bytes_up:,} bytes from them"
    requests = f"{3 * ledger.exchanges:,} requests to sites"  # each exchange asks all three sites
    assert (
        f"- Costs: {ledger.exchanges} exchanges to fit the model, simulated on one machine: {requests}, {sent}" in lines
    )
    assert any(line.startswith("- Differential privacy: none: no noise was added") for line in lines)
    assert "- Costs: not stored with the model" in loaded.splitlines()
    assert "- Differential privacy: none: no noise was added" in loaded
    assert all(f"    {line}" in lines for line in str(fitted.report).splitlines())
    assert "auroc" in card
    assert "There is no report with this model." in loaded
    assert "auroc" not in loaded


def test_a_column_without_a_frequent_category_is_described_as_not_used():
    frames = {site: frame.assign(code=np.arange(len(frame)) // 2) for site, frame in tables().items()}
    with pytest.warns(DataWarning, match=r"the model does not use 'code', because at each site, fewer than min_count"):
        card = study("logistic").fit(frames).card()
    assert "- `code`: at each site, every category has too few rows to be named; it is not used" in card.splitlines()


def test_costs_of_several_runs_are_added():
    first = Ledger(exchanges=2, replies=6, bytes_down=100, bytes_up=1000)
    last = Ledger(exchanges=3, replies=9, bytes_down=10, bytes_up=2000)
    costs = StudyCosts.of([first, last])
    assert costs == StudyCosts(exchanges=5, requests=15, bytes_down=110, bytes_up=3000, simulated=True)


def test_names_of_columns_and_sites_end_no_line():
    """A card shows the name of a column within a line, because a site chooses it and may put a line break into it."""
    frames = {site: frame.rename(columns={"age": "age\n# `x`"}) for site, frame in tables().items()}
    titles = [line for line in study("ridge").fit(frames).card().splitlines() if line.startswith("#")]
    assert len(titles) == 4
