"""Faults of a federation's processes: the result is that of the run in which the faulty were absent, and no more."""

import pytest
from federation_app import SAME, Trial
from federation_faults import FAULTS, answered_wrongly

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
        trial.renew()  # the next test is to find everyone well
        raise


def test_an_answer_that_does_not_count_leaves_no_trace_in_what_its_client_keeps(trial):
    """The answer is spoiled on its way: the client has changed its state by then, and is not told to take that back."""
    assert answered_wrongly(trial, "nan", "not finite", algorithm="two-phase") <= SAME
