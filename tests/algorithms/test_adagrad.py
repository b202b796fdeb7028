"""Are AdaGrad's steps on x within their bounds, and can all entries share one step?"""

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.algorithms.parts.adagrad import REACH, AdaGrad


@pytest.mark.parametrize("shape", [(100,), (10, 10)])
def test_no_entry_moves_by_more_than_the_field_says(shape):
    """The steps on one leaf are as long as derived, and no entry moves by more than η = 0.1, also if h² overflows.

    The start x_0 is (0.1, 0.2), 50 times, so that ‖x_0‖ = √2.5 and r_0 = Rη √2.5/10, which is below η.

    Only one entry of h is not 0. In the first round the entry moves by at most r_0, in the second by at most its
    distance from the start over √2. In a matrix the sum of this entry is (½ + ½/100) h², since the mean square over the
    100 entries is a hundredth of h², and the first two steps have a tenth and two tenths of their full length. A start
    that is ten times as large moves by η, since r_0 is then Rη.
    """
    small = jnp.tile(jnp.asarray([0.1, 0.2]), 50).reshape(shape)
    one = jnp.zeros(100).at[0].set(1e200).reshape(shape)  # its square is too large for a float
    root, warm = (1.0, (1, 1)) if len(shape) == 1 else (0.505**0.5, (0.1, 0.2))
    for start, numerator in ((small, 0.1 * REACH * 2.5**0.5 / 10), (10 * small, 0.1 * REACH)):
        moved, after = AdaGrad.begin(start).moved(start, one, 0.1)
        most = min(warm[0] * numerator / root, 0.1)
        np.testing.assert_allclose(jnp.ravel(moved - start), -most * (np.arange(100) == 0), rtol=1e-6, atol=1e-12)
        assert float(after.step) == pytest.approx(0)  # ‖Δx‖/‖h‖; it is a number although ‖h‖² overflows
        again, _ = after.moved(moved, one, 0.1)
        second = min(warm[1] * max(numerator, most) / (2**0.5 * root), 0.1)
        assert float(jnp.max(moved - again)) == pytest.approx(second)
    still, nothing = AdaGrad.begin(small).moved(small, 0 * one, 0.1)
    assert np.array_equal(still, small)
    assert float(nothing.step) == 0


def test_one_step_for_all_entries_is_along_the_hypergradient():
    """With one step for all entries, x moves along h, by r/s or, if that is shorter, by η = 0.1 in the largest entry.

    s² is the mean over the two entries of the sums of squares: 25/2 after h = (3, 4), and 12.5 (1 + 0.01²) after h and
    h/100. The steps with 100h and with h/100 both follow the first step, with h.

    r = Rη = 0.3, since ‖x_0‖ > √2. The bound applies to the steps with h and with 100h: the largest entry moves by η,
    and the other one in proportion. The step with h/100 is r/s.
    """
    x, h = jnp.asarray([10.0, 20.0]), jnp.asarray([3.0, 4.0])
    one, kept = AdaGrad.begin(x).moved(x, h, 0.1, one_step=True)
    np.testing.assert_allclose(x - one, 0.025 * h, rtol=1e-6)
    two, _ = kept.moved(one, 100 * h, 0.1, one_step=True)
    np.testing.assert_allclose(one - two, 0.025 * h, rtol=1e-6)
    three, _ = kept.moved(one, 0.01 * h, 0.1, one_step=True)
    np.testing.assert_allclose(one - three, 0.3 / (12.5 * 1.0001) ** 0.5 * 0.01 * h, rtol=1e-6)
