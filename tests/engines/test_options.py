"""Does `RunOptions` have the options of `solve`, and does the error for a wrong option name it?"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.client import RemoteClients
from fedbilevel.engines.options import RunOptions, refuse_combinations
from refusals import ANY, refuses

SAMPLES = [{"t": np.ones(2)}, {"t": np.ones(3)}]
HERE, ELSEWHERE = fb.Clients(SAMPLES), RemoteClients(2, SAMPLES[0])
PRIVACY = fb.Privacy(1.0, 5.0, 1e-5)
BILEVEL = fb.Bilevel(lambda x, y, batch: jnp.sum(x * y), lambda x, y, batch: jnp.sum((x - y) ** 2))
SINGLE = fb.SingleLevel(lambda x, batch: jnp.sum(x**2))
SIMPLE = fb.SimpleBilevel(None, lambda x, batch: jnp.sum(x**2), fb.projections.ball(1.0))


def keywords(function):
    return [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]


def test_the_options_are_the_keywords_of_solve():
    """RunOptions has the keywords of `solve`: the same names, types and defaults, in the same order."""
    assert keywords(RunOptions) == keywords(fb.solve)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", 0),
        ("eval_every", 0),
        ("checkpoint_every", True),
        ("resume", "maybe"),
        ("key", 1.0),
        ("key", np.zeros(2, np.uint32)),
        ("metrics", [abs]),
        ("metrics_per_client", abs),
        ("best_by", 3),
        ("on_divergence", "ignore"),
        ("privacy", 1.0),
        ("callbacks", print),
        ("progress", "always"),
    ],
)
def test_an_option_is_refused_by_its_name(name, value):
    with refuses(name, value if np.ndim(value) == 0 else ANY):
        RunOptions(**{"rounds": 1, name: value})


def test_a_seed_and_the_key_made_of_it_are_the_same():
    seed, key = RunOptions(rounds=1, key=3), RunOptions(rounds=1, key=jax.random.key(3))
    assert seed.jax_key == key.jax_key


def test_a_metric_is_named_by_text_and_says_which_way_is_better():
    with refuses("metric accuracy", fact="Metric"):
        RunOptions(rounds=1, metrics={"accuracy": lambda x, y: 0.0})
    with refuses("the name of a metric", 3):
        RunOptions(rounds=1, metrics={3: lambda x, y: 0.0})


@pytest.mark.parametrize(
    ("options", "problem", "clients", "y0", "path", "got", "fact"),
    [
        ({"resume": "auto"}, BILEVEL, HERE, 0.0, "resume", "auto", "checkpoint"),
        ({"on_divergence": "shrink"}, BILEVEL, ELSEWHERE, 0.0, "on_divergence", "shrink", "'stop'"),
        ({"privacy": PRIVACY}, BILEVEL, ELSEWHERE, 0.0, "privacy", PRIVACY, "None"),
        ({"privacy": PRIVACY, "on_divergence": "shrink"}, BILEVEL, HERE, 0.0, "on_divergence", "shrink", "privacy"),
        (
            {"privacy": PRIVACY, "metrics_per_client": {"m": lambda x, y, batch: 0.0}},
            BILEVEL, HERE, 0.0, "metrics_per_client", ["m"], "privacy",
        ),
        ({}, SINGLE, HERE, 0.0, "y0", 0.0, "SingleLevel"),
        ({}, SIMPLE, HERE, None, "SimpleBilevel.outer", None, "(x)"),
        ({}, BILEVEL, fb.Clients(SAMPLES, local_steps=[[1, 2]] * 3), 0.0, "rounds", 5, "at most 3"),
        ({}, BILEVEL, fb.Clients(SAMPLES, capacity=[[0.5, 1.0]] * 4), 0.0, "rounds", 5, "at most 4"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_its_name(options, problem, clients, y0, path, got, fact):
    with refuses(path, got, fact):
        refuse_combinations(RunOptions(rounds=5, **options), problem, clients, y0)


def test_what_goes_together_is_let_through():
    options = RunOptions(rounds=3, privacy=PRIVACY, on_divergence="stop", checkpoint="run.npz", resume=True)
    refuse_combinations(options, BILEVEL, fb.Clients(SAMPLES, local_steps=[[1, 2]] * 3), 0.0)


def test_clients_elsewhere_that_keep_a_state_need_a_checkpoint_of_every_round(tmp_path):
    options = {"rounds": 4, "checkpoint": tmp_path / "run.npz", "checkpoint_every": 2}
    with refuses("checkpoint_every", 2, "1 or None"):
        fb.solve(fb.SimFBO(local_steps=1), BILEVEL, ELSEWHERE, jnp.zeros(()), jnp.zeros(()), **options)
