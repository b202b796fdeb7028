"""Methods without given steps on random problems do not diverge, and say so if they end worse than they began.

The problems are those of benchmarks/family.py. benchmarks/family.json has the results of the best of 12 pairs of fixed
steps, with which the ends are compared.
"""

import numpy as np
import pytest
from benchmarks.family import GROUPS, ROUNDS, kept, played

OTHER = 8  # a family of problems on which no number of the adaptive steps was chosen
FEW = {"SimFBO": 1, "FedBiO": 6, "AFBO": 4, "AggITD": 5}
"""A group for each of four methods: stiffening penalties in float32, raw penalties, a linear map, and softmax."""


def check(ends):
    """Check that all ends are finite, and that runs which end above their start say so."""
    assert all(np.isfinite(end.loss) for end in ends)
    assert all(end.said for end in ends if end.loss > 1.001 * end.start)


@pytest.mark.slow
def test_a_member_that_diverges_if_x_takes_long_steps():
    """If a long step on x makes a penalty negative, the run goes back to an earlier row and ends below its start."""
    end = played("SimFBO", 6, 1, OTHER)
    check([end])
    assert end.loss < end.start
    assert not any("diverges" in said for said in end.said)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_few_members(name):
    ends = [played(name, FEW[name], number, OTHER) for number in range(4)]
    check(ends)
    assert sum(end.loss < end.start for end in ends) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("group", range(len(GROUPS)))
@pytest.mark.parametrize("name", ROUNDS)
def test_other_members(name, group):
    check([played(name, group, number, OTHER) for number in range(GROUPS[group].members)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUNDS)
def test_steps_that_nobody_chose_end_where_the_best_of_12_do(name):
    """Without given steps, the outer loss at the end is close to that of the best of 12 pairs of fixed steps.

    The ratio is at most 1.02 in the median, and 1.15 at the 90th percentile.
    """
    members = [(group, number) for group in range(len(GROUPS)) for number in range(GROUPS[group].members)]
    ends = [played(name, *one) for one in members]
    check(ends)
    best = np.concatenate([kept(name, group) for group in range(len(GROUPS))])
    ratios = np.array([end.loss for end in ends]) / best
    assert np.median(ratios) <= 1.02
    assert np.quantile(ratios, 0.9, method="nearest") <= 1.15
