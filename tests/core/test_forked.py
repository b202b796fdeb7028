"""Is a child that was forked after JAX had started refused? It would otherwise wait for ever."""

import os
import subprocess
import sys

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.authoring import History, Ledger

PROGRAM = """
import os, sys, warnings
import jax
import numpy as np
import fedbilevel as fb

def loss(x, y, batch):
    return (x * y**2 + batch).mean()

def fit():
    fb.estimators.Ridge(penalties=1.0).fit(np.eye(3), np.arange(3), groups=[0, 0, 1])

def parts():
    return fb.Bilevel(loss, loss), fb.Clients(np.zeros((2, 3))), 0.0, 0.0

calls = {
    "fit": fit,
    "solve": lambda: fb.solve(fb.SimFBO(), *parts(), rounds=1),
    "check": lambda: fb.check_hypergradient(*parts()),
    "diagnose": lambda: fb.diagnose(*parts()),
    "load": lambda: fb.Result.load(sys.argv[1]),
}

def in_a_child(*names):
    if os.fork() == 0:
        for name in names:
            try:
                calls[name]()
                print(name, "computes", flush=True)
            except fb.errors.ConfigurationError as error:
                print(name, error, flush=True)
        os._exit(0)
    os.wait()

warnings.simplefilter("ignore")
in_a_child("load")
jax.devices()
in_a_child(*calls)
calls["load"]()
print("process", os.getpid(), "computes", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked here")
def test_a_child_that_is_forked_after_jax_has_started_is_refused(tmp_path):
    """Every call that computes is refused in a child that was forked after JAX had started.

    The error names the process from which the child was forked, and says how to start a child that can compute.

    A child that was forked before JAX had started can compute, and so can the parent.
    """
    fb.Result(np.zeros(1), None, 1, 1, History(), Ledger()).save(tmp_path / "result.npz")
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "result.npz")]
    shown = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    early, *late, parent = shown.stdout.splitlines()
    assert (early, parent.split()[2]) == ("load computes", "computes")
    assert [line.split()[0] for line in late] == ["fit", "solve", "check", "diagnose", "load"]
    for line in late:
        assert f"was forked from process {parent.split()[1]} after JAX had started" in line
        assert 'multiprocessing.get_context("spawn")' in line
