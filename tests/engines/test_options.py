"""Are the options of a run those of `solve`, and is each refused by itself, by its name?"""

import inspect

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.options import RunOptions


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
