"""Which steps count as given by the user?"""

import pytest

import fedbilevel as fb
from fedbilevel.core.hyperparameters import given_steps, halved


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (fb.LFedNest(), []),
        (fb.LFedNest(outer_lr=0.1), ["outer_lr"]),
        (fb.LFedNest(inner=fb.parts.LocalSGD(server_lr=2.0)), ["inner.server_lr"]),
        (fb.LFedNest(inner=fb.parts.LocalSGD(lr=lambda round: 0.1)), ["inner.lr"]),
        (fb.SimFBO(server_lr=fb.XYV(0.1, 0.2, 0.3)), ["server_lr"]),
        (fb.ADBO(), ["client_lr", "server_lr", "estimate.lr"]),
        (fb.ADBO(server_lr=0.01), ["server_lr"]),
    ],
)
def test_a_default_counts_as_given_only_if_no_step_adapts_or_is_given(method, names):
    assert given_steps(method) == names
    assert given_steps(halved(halved(method)), halvings=2) == names
