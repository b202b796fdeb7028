"""Do runs, comparisons and federations have the layers of a spec, and are wrong layers refused by their fields?"""

from __future__ import annotations

from typing import get_args, get_type_hints

import numpy as np
import pytest
from command_line import outcome

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.algorithms.parts.memory import Compressor
from fedbilevel.algorithms.parts.robust import RobustRule
from fedbilevel.cli import main
from fedbilevel.experiments import federation
from fedbilevel.experiments.plans import LayersPlan
from fedbilevel.experiments.runner import build
from fedbilevel.experiments.series import comparison_specs
from fedbilevel.flower.launch.in_process import InProcess
from refusals import ANY, codes, raises_with, refuses
from test_class_rules import below, classes

pytest.importorskip("flwr")
SMALL = ["clients=5", "samples=[8, 8]", "client_lr=0.01", "server_lr=0.02", "run.rounds=6", "run.eval_every=2"]
SHORT = ["layers.compression=top_k", "layers.compression.share=0.4"]
LAYERS = {
    "none": ([], ()),
    "top_k": (SHORT, (fb.parts.TopK(share=0.4),)),
    "late": ([*SHORT, "asynchronous.wait_for=3"], (fb.parts.TopK(share=0.4), fb.Asynchronous(wait_for=3))),
    "median": (["rule=median"], (fb.parts.Median(),)),
    "krum": (["layers.rule=krum"], (fb.parts.Krum(bad=1),)),
    "trimmed_mean": (["rule.name=trimmed_mean", "layers.rule.trim=2"], (fb.parts.TrimmedMean(trim=2),)),
    "centred_clipping": (
        ['layers.rule={name = "centred_clipping", radius = 0.3}'],
        (fb.parts.CentredClipping(radius=0.3),),
    ),
}


def test_specs_have_all_compressors_and_robust_rules_of_the_library():
    hints = get_type_hints(LayersPlan)
    for field, base in {"compression": Compressor, "rule": RobustRule}.items():
        assert set(get_args(hints[field])) == {*final_classes(base), type(None)}


def final_classes(base):
    """Return the classes of the library below a base class that have no subclasses."""
    return [cls for cls in classes() if issubclass(cls, base) and not any(below(cls))]


def spec(*settings):
    return experiments.configure(task="quadratic", algorithm="simfbo", settings=[*SMALL, *settings])


@pytest.mark.parametrize("case", LAYERS)
def test_a_spec_stands_for_the_method_with_these_layers(case):
    """A spec's method is `fb.layered` with its layers, and the spec that is read from its TOML is the same."""
    settings, layers = LAYERS[case]
    made = spec(*settings)
    plain = build(spec()).algorithm
    assert build(made).algorithm == fb.layered(plain, *layers)
    assert experiments.resolve(made.tables()) == made


def test_a_run_is_compressed_and_resumed_as_its_spec_says(tmp_path):
    """Top-k with a share of 0.4 sends fewer bytes, and a run that is resumed has the bits of a whole run."""
    made = spec(*SHORT)
    experiments.run(made, tmp_path / "whole", plot=False)
    experiments.run(made.replace(run={"rounds": 4}), tmp_path / "run", plot=False)
    experiments.resume(tmp_path / "run", rounds=6, plot=False)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    experiments.run(spec(), tmp_path / "plain", plot=False)
    sent = [experiments.load_run(tmp_path / name).ledger["bytes_up"] for name in ("whole", "plain")]
    assert sent[0] < 0.9 * sent[1]


@pytest.mark.parametrize("case", ["top_k", pytest.param("median", marks=pytest.mark.slow)])
def test_a_federation_has_the_layers_of_its_spec(case, tmp_path):
    """A federation over Flower gives the numbers of a simulation of its spec with a layer, to 1e-12."""
    made = spec(*LAYERS[case][0])
    federation.serve(made, InProcess(federation.client_app(made), 5), {"out": str(tmp_path / "federation")})
    experiments.run(made, tmp_path / "simulation", plot=False)
    here, there = (experiments.load_run(tmp_path / name) for name in ("federation", "simulation"))
    assert here.ledger["bytes_up"] == there.ledger["bytes_up"]
    np.testing.assert_allclose(here.history["outer_loss"], there.history["outer_loss"], rtol=1e-12)


def test_a_server_cannot_set_a_layer_that_a_site_does_not_let_it_set(tmp_path):
    """A server can set only the fields that a site allows. By default, a site allows [algorithm] and [run]."""
    settings = {"settings": "layers.rule=krum"}
    grid = InProcess(federation.client_app(spec()), 5, run_config=settings)
    with raises_with(fb.errors.ExchangeError) as caught:
        federation.serve(spec(), grid, {**settings, "out": str(tmp_path / "run")})
    assert "layers.rule" in str(caught.value), codes(caught.value)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["layers.rule=medan"], ("part for layers.rule", "medan", "", "median")),
        (["layers.rule.bad=1"], ("layers.rule.name", None, "krum")),
        (["layers.compression.share=0.5"], ("layers.compression.name", None, "top_k")),
        (["layers.rule.name=krum", "layers.rule.bad=0"], ("layers.rule.bad", 0)),
        (["layers.compression.name=top_k", "layers.compression.share=1.5"], ("TopK.share", 1.5, "at most 1")),
        (["layers.rule=top_k"], ("part for layers.rule", "top_k", "krum")),
        (["layers.rules=krum"], ("field of layers", "rules", "", "rule")),
        (["layers.rule=median", *SHORT], ("", ANY, "Median and TopK cannot be combined")),
        (["layers.rule=median", "asynchronous.wait_for=2"], ("", ANY, "Median and Asynchronous cannot be combined")),
    ],
)
def test_wrong_layers_are_refused(settings, refusal):
    def made():
        build(spec(*settings))

    with refuses(*refusal):
        made()


def test_one_method_of_a_comparison_may_have_a_layer(tmp_path):
    """In a comparison, NAME.layers.… sets a layer for one method only."""
    specs = comparison_specs("quadratic", ["simfbo", "shrofbo"], settings=["simfbo.layers.rule=median", "clients=5"])
    assert specs["simfbo"].layers.rule == fb.parts.Median()
    assert specs["shrofbo"].layers.rule is None


def test_the_centralised_run_of_a_comparison_has_no_layers():
    """A single client sends nothing, and Krum needs five replies."""
    settings = ["layers.rule=krum", *SMALL]
    specs = comparison_specs("quadratic", ["simfbo"], settings=settings, centralised=True)
    assert specs["simfbo"].layers.rule == fb.parts.Krum(bad=1)
    assert specs["centralised"].layers == LayersPlan()


def test_a_search_with_a_robust_rule_is_refused():
    """A search with a rule would run as a single training at x0, since only a bare search is played as one."""
    pytest.importorskip("optuna")
    settings = ["layers.rule=median", "clients=5", "run.exchanges=20"]
    specs = comparison_specs("quadratic", ["simfbo"], settings=settings, against=["random"], search_box=(-1, 1))
    with refuses("layers.rule", "Median", "none for"):
        build(specs["search-Random"])


def test_the_command_line_sets_a_layer(tmp_path):
    words = ["run", "quadratic", "--rounds", "2", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*words, "--set", "compression=top_k", "--set", "server_lr=0.1", "--set", "client_lr=0.1"]) == 0
    assert experiments.load_run(tmp_path / "run").spec.layers.compression.share == 0.1
