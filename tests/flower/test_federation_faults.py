"""If a federation's processes fail, the result is that of a run without the replies that the fault takes."""

import pytest
from federation_app import SAME, Trial
from federation_faults import FAULTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    with Trial(tmp_path_factory.mktemp("faults"), ports=24100) as trial:
        yield trial
    assert trial.left() == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_no_more_than_the_answers_it_takes(fault, trial):
    try:
        assert FAULTS[fault](trial) <= SAME
    except BaseException:
        trial.renew()  # so that all processes work in the next test
        raise
