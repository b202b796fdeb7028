"""A forked child of a process in which JAX has started is refused, where it would wait for ever."""

import os
import subprocess
import sys

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core import forked

PROGRAM = """
import os, warnings
import jax.numpy as jnp
import numpy as np
import fedbilevel as fb

warnings.simplefilter("ignore")
for started in (False, True):
    if started:
        jnp.zeros(1)
    if os.fork() == 0:
        try:
            fb.estimators.Ridge(penalties=1.0).fit(np.eye(3), np.arange(3), groups=[0, 0, 1])
            print("computed", flush=True)
        except fb.errors.ConfigurationError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
fb.estimators.Ridge(penalties=1.0).fit(np.eye(3), np.arange(3), groups=[0, 0, 1])
print("the parent", os.getpid(), "computes")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_child_that_is_forked_after_jax_has_started_is_refused():
    shown = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    early, late, parent = shown.stdout.splitlines()
    assert early == "computed"
    assert f"was forked from process {parent.split()[2]} after JAX had started" in late
    assert 'multiprocessing.get_context("spawn")' in late


def loss(x, y, batch):
    return (x * y**2 + batch).mean()


@pytest.mark.parametrize(
    "call",
    [
        lambda *parts: fb.solve(fb.SimFBO(), *parts, rounds=1),
        fb.check_hypergradient,
        fb.diagnose,
        lambda *_: fb.estimators.Ridge().fit(np.eye(2), np.arange(2)),
    ],
)
def test_every_call_that_computes_looks_whether_it_can(call, monkeypatch):
    monkeypatch.setattr(forked, "_started_in", [os.getpid() + 1])
    with pytest.raises(fb.errors.ConfigurationError, match=rf"process {os.getpid()} was forked from process"):
        call(fb.Bilevel(loss, loss), fb.Clients(np.zeros((2, 3))), 0.0, 0.0)
