"""Where does a run that diverges return to, how often, and with which warnings?"""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XY
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.divergence import Met, Movement
from fedbilevel.engines.engine import Carry
from fedbilevel.engines.history import History, Result
from fedbilevel.engines.rescue import Rescue
from fedbilevel.engines.virtual_time import ClockState

METHOD = fb.FedAvg(lr=0.1)


def carry(round):
    return Carry(jnp.asarray(round), XY(jnp.asarray(float(round)), None), None, ClockState.start())


def result(round, x=1.0, y=None):
    state = XY(jnp.asarray(x), y if y is None else jnp.asarray(y))
    return Result(state.x, None, round, 9, History([{"round": round}]), Ledger(), state=state)


def rescue(halvings_at_most=2, x=1.0, y=None, **met):
    return Rescue(lambda *point: Met(**met), (x, y), everyone=True, halvings_at_most=halvings_at_most)


def test_a_run_returns_to_the_row_before_its_best_and_gives_up_in_the_end():
    found = rescue()
    for round, is_best in [(0, True), (2, False), (4, True), (6, False)]:
        found.keep(carry(round), is_best)
    for times in (1, 2):
        with pytest.warns(fb.errors.NumericalWarning, match=rf"\bwhy; .*round 2, .*{times} of at most 2\b"):
            assert int(found.retreat("why", result(7), METHOD).round) == 2
        assert found.may_return(5, result(7))  # also after the last time, so that the run ends there
        assert (found.halvings, found.gave_up) == (times, "")
    with pytest.warns(fb.errors.NumericalWarning, match=r"^why: .*lower lr"):
        assert int(found.retreat("why", result(7), METHOD).round) == 2
    assert found.halvings == 2
    assert found.gave_up.startswith("why: the run diverges")


def test_a_run_that_never_returns_keeps_no_copies():
    found = rescue(halvings_at_most=0)
    found.keep(carry(0), is_best=True)
    assert found.latest is None
    assert not found.may_return(5, result(1))


def test_a_run_whose_start_is_at_fault_does_not_return_to_it():
    assert rescue().may_return(1, result(1))
    assert not rescue(at_start=True).may_return(1, result(1))
    assert rescue(at_start=True).may_return(2, result(1))


def test_a_point_that_is_far_from_where_it_began_is_warned_of_once():
    found = rescue(x=2.0)
    for round, x in [(0, 2.0), (1, 2e5), (2, 3e6)]:
        found.watch(History([{"round": round}]), {}, {}, result(round, x))
    assert found.growth == "round 2: the norm of x and y has grown from 2 to 3e+06"
    with pytest.warns(fb.errors.NumericalWarning, match="has grown from 2 to"):
        found.warn_of_growth(result(2), METHOD)
    found.warn_of_growth(result(2), METHOD)


def test_what_a_checkpoint_has_of_it_is_taken_up():
    found, again = rescue(), rescue()
    found.halvings, found.gave_up = 2, "it diverged"
    again.continue_from(found.to_json(diverged=False))
    assert (again.halvings, again.gave_up) == (2, "it diverged")
    assert found.to_json(diverged=False)["diverged"] is True
    assert rescue().to_json(diverged=False)["diverged"] is False


@pytest.mark.parametrize(
    ("x", "named", "not_named"),
    [
        (2.1, ("y_lr", " 1 to 51", " 0.1"), "project_x"),  # 0.1 is less than NEAR = 0.1 times the start, 2
        (1.7, ("project_x", "x_lr"), "y_lr"),
        (np.inf, ("project_x", "x_lr"), "y_lr"),
    ],
)
def test_only_what_has_moved_is_to_move_more_slowly(x, named, not_named):
    """If all steps adapt, the advice is about x only if x is no longer near its start; otherwise it is about y."""
    advice = rescue(x=2.0, y=1.0).advice(result(3, x, 51.0), fb.layered(fb.SimFBO(), fb.AdaptiveSteps()))
    assert all(one in advice for one in named)
    assert not_named not in advice


def test_blocks_of_x_that_clients_keep_are_compared_with_the_one_start():
    """Two clients start at x = (1, 1), and one entry of the second moves by 3."""
    blocks = np.array([[1.0, 1.0], [1.0, 4.0]])
    assert Movement.between(np.ones(2), blocks, (0.0, 5.0)) == Movement(3.0, True, (0.0, 5.0))


def test_an_error_says_what_may_help():
    error = fb.errors.NonFiniteError("round 3, server update: .x is not finite")
    error.result = result(3, np.inf)
    rescue().explain(error, METHOD)
    assert (
        str(error)
        == "round 3, server update: .x is not finite; smaller steps may help (fb.diagnose suggests some); lower lr"
    )
