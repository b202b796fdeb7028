"""Are the options of a run those of `solve`, and is each refused by itself, by its name?"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.client import RemoteClients
from fedbilevel.engines.options import RunOptions, refuse_combinations

SAMPLES = [{"t": np.ones(2)}, {"t": np.ones(3)}]
HERE, ELSEWHERE = fb.Clients(SAMPLES), RemoteClients(2, SAMPLES[0])
PRIVACY = fb.Privacy(1.0, 5.0, 1e-5)
BILEVEL = fb.Bilevel(lambda x, y, batch: jnp.sum(x * y), lambda x, y, batch: jnp.sum((x - y) ** 2))
SINGLE = fb.SingleLevel(lambda x, batch: jnp.sum(x**2))
SIMPLE = fb.SimpleBilevel(None, lambda x, batch: jnp.sum(x**2), fb.projections.ball(1.0))


def keywords(function):
    return [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]


def test_the_options_are_the_keywords_of_solve():
    """The same names, types and defaults, in the same order."""
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
    with pytest.raises(fb.errors.ConfigurationError) as refused:
        RunOptions(**{"rounds": 1, name: value})
    assert refused.value.path == name


def test_a_seed_and_the_key_made_of_it_are_the_same():
    seed, key = RunOptions(rounds=1, key=3), RunOptions(rounds=1, key=jax.random.key(3))
    assert seed.jax_key == key.jax_key


def test_a_metric_is_named_by_text_and_says_which_way_is_better():
    for name, words in {
        "accuracy": "does not say whether a larger value is better",
        3: "the name of a metric = 3",
    }.items():
        with pytest.raises(fb.errors.ConfigurationError, match=words):
            RunOptions(rounds=1, metrics={name: lambda x, y: 0.0})


@pytest.mark.parametrize(
    ("options", "problem", "clients", "y0", "words"),
    [
        ({"resume": "auto"}, BILEVEL, HERE, 0.0, "resume = 'auto' .* together with checkpoint"),
        ({"on_divergence": "shrink"}, BILEVEL, ELSEWHERE, 0.0, "on_divergence = .* other processes know the steps"),
        ({"privacy": PRIVACY}, BILEVEL, ELSEWHERE, 0.0, "privacy = .* each site sets its own"),
        ({"privacy": PRIVACY, "on_divergence": "shrink"}, BILEVEL, HERE, 0.0, "on_divergence = .* under privacy"),
        (
            {"privacy": PRIVACY, "metrics_per_client": {"m": lambda x, y, batch: 0.0}},
            BILEVEL, HERE, 0.0, r"metrics_per_client = \['m'\] .* None under privacy",
        ),
        ({}, SINGLE, HERE, 0.0, "y0 = 0.0 .* SingleLevel problems have no inner variable"),
        ({}, SIMPLE, HERE, None, r"SimpleBilevel\.outer = None .* a function \(x\) on the server"),
        ({}, BILEVEL, fb.Clients(SAMPLES, local_steps=[[1, 2]] * 3), 0.0, "rounds = 5 .* at most 3, .* local_steps"),
        ({}, BILEVEL, fb.Clients(SAMPLES, capacity=[[0.5, 1.0]] * 4), 0.0, "rounds = 5 .* at most 4, .* capacity"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_its_name(options, problem, clients, y0, words):
    with pytest.raises(fb.errors.ConfigurationError, match=words):
        refuse_combinations(RunOptions(rounds=5, **options), problem, clients, y0)


def test_what_goes_together_is_let_through():
    options = RunOptions(rounds=3, privacy=PRIVACY, on_divergence="stop", checkpoint="run.npz", resume=True)
    refuse_combinations(options, BILEVEL, fb.Clients(SAMPLES, local_steps=[[1, 2]] * 3), 0.0)


def test_clients_elsewhere_that_keep_a_state_need_a_checkpoint_of_every_round(tmp_path):
    options = {"rounds": 4, "checkpoint": tmp_path / "run.npz", "checkpoint_every": 2}
    with pytest.raises(fb.errors.ConfigurationError, match=r"checkpoint_every = 2 .* SimFBO keep a state"):
        fb.solve(fb.SimFBO(local_steps=1), BILEVEL, ELSEWHERE, jnp.zeros(()), jnp.zeros(()), **options)
