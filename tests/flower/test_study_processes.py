"""A study over processes of a SuperLink and SuperNodes, with TLS and keys, has the numbers of one machine."""

import numpy as np
import pytest

from fedbilevel.estimators import StudyModel
from fedbilevel.experiments.study import write_app
from fedbilevel.flower.launch.processes import Federation
from site_tables import SITES, study, tables

pytestmark = pytest.mark.slow


def test_processes_have_the_numbers_of_one_machine(tmp_path):
    given, frames, configs = study("logistic"), tables(), []
    for number, name in enumerate(SITES):
        frames[name].to_csv(tmp_path / f"{name}.csv", index=False)
        own = f"site='{name}' table='{tmp_path}/{name}.csv' state-folder='{tmp_path}/state-{name}'"
        configs.append(f"partition-id={number} max-local-steps=5 {own}")
    write_app(given, tmp_path / "app")
    with Federation(tmp_path / "federation", len(SITES), node_configs=configs) as federation:
        config = f"out='{tmp_path}/run' client-keys='{federation.credentials.ca.parent}'"
        lines = list(federation.run(tmp_path / "app", config, timeout=500))
    assert (tmp_path / "run" / "model.json").exists(), "".join(lines)
    model, here = StudyModel.load(tmp_path / "run" / "model.json"), given.fit(frames)
    np.testing.assert_allclose(model.estimator.coef_, here.estimator.coef_, rtol=0, atol=1e-10)
    patient = frames["west"].iloc[[3]]
    np.testing.assert_allclose(model.predict_proba(patient, "west"), here.predict_proba(patient, "west"), rtol=1e-9)
