"""Does a checkpoint detect that a run is continued with other arguments, and name them?"""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.authoring import Compressor
from fedbilevel.core.problem import check_losses
from fedbilevel.core.ragged import Ragged
from fedbilevel.engines import fingerprint
from fedbilevel.engines.process_group import current_group
from fedbilevel.engines.saver import FORCE, START_ANEW
from fedbilevel.machinery import kept
from fixed_steps import fixed
from refusals import raises_with, refuses, warns_with

RNG = np.random.default_rng(0)
SAMPLES = [{"a": RNG.normal(size=(n, 2)), "b": RNG.normal(size=n)} for n in (3, 5, 4, 2, 6, 3)]
SCALE, OTHER_SCALE = np.array([1.0, 2.0]), np.array([1.0, 2.0 + 1e-9])


def fit(x, y, batch):
    return jnp.mean((batch["a"] @ (SCALE * y) - batch["b"]) ** 2)


def ridge(x, y, batch):
    return fit(x, y, batch) + jnp.exp(x) * jnp.vdot(y, y)


def changed_samples(*clients):
    return [
        {**own, "b": own["b"] + 1e-3 * (np.arange(len(own["b"])) == 0)} if client in clients else own
        for client, own in enumerate(SAMPLES)
    ]


def softer(x, y, batch):
    return fit(x, y, batch) + 0.5 * jnp.exp(x) * jnp.vdot(y, y)


def taken(
    outer=fit,
    inner=ridge,
    samples=SAMPLES,
    x0=0.0,
    y0=(0.0, 0.0),
    algorithm=None,
    kind=fb.Bilevel,
    **clients,
):
    algorithm = algorithm or fixed(fb.SimFBO())
    problem, clients = kind(outer, inner), fb.Clients(samples, samples, **clients)
    x, y = jnp.asarray(x0), jnp.asarray(y0)
    losses = check_losses(problem, x, y, *clients.examples())
    made = fingerprint.take({}, algorithm, problem, clients, x, y, losses)
    return dataclasses.replace(made, samples=fingerprint.of_samples(clients, current_group()))


def scheduled(start):
    return fixed(fb.SimFBO(server_lr=optax.linear_schedule(start, 0.1, 100)))


STEPS = {"x": 0.01, "y": 0.1, "v": 0.1}  # of `fixed`
SCHEDULES = dict.fromkeys(f"schedule server_lr.{name}" for name in "xyv")
CHANGES = {
    "a sample": (
        {"samples": changed_samples(2)},
        dict.fromkeys(["inner samples of client 2", "outer samples of client 2"]),
    ),
    "some clients' samples": (
        {"samples": changed_samples(0, 1, 2, 5)},
        dict.fromkeys(["inner samples of clients 0 to 2, 5", "outer samples of clients 0 to 2, 5"]),
    ),
    "another order": (
        {"samples": [SAMPLES[i] for i in (0, 5, 2, 3, 4, 1)]},
        dict.fromkeys(
            ["clients' numbers of samples", "inner samples of clients 1, 5", "outer samples of clients 1, 5"]
        ),
    ),
    "fewer clients": (
        {"samples": SAMPLES[:5]},
        {"clients": (6, 5), "clients' weights": None, "clients' numbers of samples": None},
    ),
    "samples of another type": (
        {"samples": [{**own, "b": own["b"].astype(np.float32)} for own in SAMPLES]},
        dict.fromkeys(
            [
                *("samples' shapes and types", "outer loss", "inner loss"),
                *("inner samples of clients 0 to 5", "outer samples of clients 0 to 5"),
            ]
        ),
    ),
    "weights": ({"weights": [1, 1, 1, 1, 1, 2]}, {"clients' weights": None}),
    "local steps": ({"local_steps": (1, 3)}, {"clients' local steps": None}),
    "capacities": ({"capacity": [1, 1, 1, 1, 1, 0.5]}, {"clients' capacities": None}),
    "x0": ({"x0": 0.1}, {"x0": None}),
    "y0": ({"y0": (0.0, 1e-9)}, {"y0": None}),
    "the inner loss": ({"inner": softer}, {"inner loss": None}),
    "a constant of the outer loss": (
        {"outer": lambda x, y, batch: jnp.mean((batch["a"] @ (OTHER_SCALE * y) - batch["b"]) ** 2)},
        {"outer loss": None},
    ),
    "a step size": (
        {"algorithm": fixed(fb.SimFBO(server_lr=0.7))},
        {f"server_lr.{name}": (before, 0.7) for name, before in STEPS.items()},
    ),
    "a schedule": (
        {"algorithm": scheduled(0.3)},
        {f"server_lr.{name}": (before, None) for name, before in STEPS.items()} | SCHEDULES,
    ),
    "an optimizer": (
        {"algorithm": fixed(fb.SimFBO(server_optimizer=optax.sgd(0.5)))},
        {"server_optimizer": None},
    ),
    "a kind of local optimizer": (
        {"algorithm": fixed(fb.SimFBO(local_optimizer=fb.parts.Momentum()))},
        {"local_optimizer": ("Plain", "Momentum"), "local_optimizer.decay": (None, 0.9)},
    ),
}
"""For each case, the arguments that have changed, and what differs: its value before and now, or None for hashes."""


@pytest.fixture(scope="module")
def before():
    return taken()


def test_nothing_differs_in_a_second_look(before):
    assert taken().differences(before) == {}
    one, again, other = (taken(algorithm=scheduled(at)) for at in (0.2, 0.2, 0.3))
    assert again.differences(one) == {}
    assert other.differences(one) == SCHEDULES
    assert fingerprint.in_words({"cohort": (6, 2), **SCHEDULES}) == (
        "its cohort is 6, not 2; different now: schedule server_lr.x, schedule server_lr.y, schedule server_lr.v"
    )


@pytest.mark.parametrize("case", CHANGES)
def test_what_differs_is_named(before, case):
    changes, differences = CHANGES[case]
    assert taken(**changes).differences(before) == differences


class Other(Compressor):
    """Send everything as it is."""

    def coded(self, tree):
        return tree


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ([fb.parts.TopK()], [], "it was written with the layer TopK, which is missing now"),
        ([], [fb.parts.TopK()], "it was written without the layer TopK, which this run has"),
        (
            [fb.parts.TopK()],
            [Other()],
            "it was written with the layer TopK, which is missing now, and without the layer Other, which this run has",
        ),
        ([fb.parts.TopK()], [fb.parts.TopK(share=0.2)], "its coded.share is 0.1, not 0.2"),
    ],
)
def test_layers_that_differ_are_named_and_not_all_fields_that_have_other_names_then(then, now, words):
    before, after = (taken(algorithm=fb.layered(fixed(fb.SimFBO()), *layers)) for layers in (then, now))
    assert fingerprint.in_words(after.differences(before)) == words


def test_a_checkpoint_without_the_names_of_layers_is_compared_without_them(before):
    old = dataclasses.replace(before, stated={k: v for k, v in before.stated.items() if k != "layers"})
    assert taken().differences(old) == {}


def test_a_field_that_an_earlier_version_did_not_have_counts_with_its_default():
    method, name = fixed(fb.FedNest()), "inner.all_samples"
    made = taken(algorithm=method)
    old = dataclasses.replace(made, stated={k: v for k, v in made.stated.items() if k != name})
    assert made.differences(old) == {}
    other = dataclasses.replace(method, inner=dataclasses.replace(method.inner, all_samples=True))
    assert taken(algorithm=other).differences(old) == {name: (None, True)}


@pytest.mark.parametrize("adapts", [False, True])
def test_another_class_of_a_part_within_a_part_is_named(adapts):
    """A change is detected in a part within a part, and in a part or optimizer of a method within a layer."""
    parts, path = fb.parts, "algorithm.hypergradient" if adapts else "hypergradient"
    exact, differences = (
        fb.AFBO(hypergradient=parts.LocalImplicit(second_order=order)) for order in (parts.Exact(), parts.Differences())
    )
    one, other = (taken(algorithm=fb.AdaptiveSteps(m) if adapts else fixed(m)) for m in (exact, differences))
    assert other.differences(one) == {f"{path}.second_order": ("Exact", "Differences")}
    assert other.differences(dataclasses.replace(one, parts={})) == {}
    if adapts:
        one, other = (taken(algorithm=fb.AdaptiveSteps(fb.SimFBO(server_optimizer=optax.sgd(lr)))) for lr in (0.5, 0.6))
        assert other.differences(one) == {"algorithm.server_optimizer": None}


def test_an_optimizers_own_functions_count():
    """A change of a function inside an optimizer is detected.

    The first two schedules have the same name and use no outer variables. Optax's own schedules close over variables
    that were never set.
    """

    def optimizer(schedule):
        return fixed(fb.SimFBO(server_optimizer=optax.sgd(schedule)))

    one, other = (lambda t: 0.1 / (1 + t)), (lambda t: 5.0 * (1 + t) ** 3)
    assert taken(algorithm=optimizer(one)).differences(taken(algorithm=optimizer(one))) == {}
    said = taken(algorithm=optimizer(other)).differences(taken(algorithm=optimizer(one)))
    assert said == {"server_optimizer": None}
    slow, fast = (optax.exponential_decay(1.0, 5, rate) for rate in (0.9, 0.5))
    assert taken(algorithm=optimizer(slow)).differences(taken(algorithm=optimizer(fast))) == said


def test_samples_that_both_losses_read_are_not_other_ones():
    """Both losses used the same samples before, and now the inner loss has others: this change is detected.

    Inner samples that are an equal copy of the outer ones do not count as a change.
    """

    def samples(*sets):
        return dataclasses.replace(taken(), samples=fingerprint.of_samples(fb.Clients(*sets), current_group()))

    others = [{**own, "b": own["b"] + 1} for own in SAMPLES]
    changed = {"inner samples of clients 0 to 5": None}
    assert samples(SAMPLES, others).differences(samples(SAMPLES)) == changed
    assert samples(SAMPLES).differences(samples(SAMPLES, others)) == changed
    assert samples(SAMPLES, [dict(own) for own in SAMPLES]).differences(samples(SAMPLES)) == {}


def test_names_precision_and_layout_do_not_count(before):
    """Other names of functions, another precision and another layout of the samples do not count as changes.

    JAX computes in float64 here, so that it gets the same numbers as NumPy has.
    """

    def renamed(x, y, batch):
        return fit(x, y, batch)

    padded = {name: np.full((6, 7, *SAMPLES[0][name].shape[1:]), 9.0) for name in "ab"}
    for name in "ab":
        for client, own in enumerate(SAMPLES):
            padded[name][client, : len(own["b"])] = own[name]
    sizes = np.array([len(own["b"]) for own in SAMPLES])
    again = taken(outer=renamed, samples=Ragged.stacked("outer", padded, sizes))
    assert again.differences(before) == {}


def test_neither_json_nor_other_versions_of_jax_make_another_loss(before):
    old = dataclasses.replace(before, versions="jax 0.1", functions={"inner loss": "traced differently"})
    assert taken().differences(fingerprint.Fingerprint(**json.loads(json.dumps(dataclasses.asdict(before))))) == {}
    assert taken().differences(old) == {}
    assert taken(x0=1.0).differences(old) == {"x0": None}


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_of_a_large_array_in_memory_every_number_counts(monkeypatch, dtype):
    """In a large array in memory, a change of any number is detected.

    The number that changes here would not be read in a memory-mapped array.
    """
    monkeypatch.setattr(fingerprint, "WHOLE", 2**10)
    values = np.zeros((10_000, 3), dtype)
    rows = Ragged({"a": values}, np.arange(100) * 100, np.full(100, 100))
    first = fingerprint.of_samples(fb.Clients(rows), current_group())["outer"]
    values[1501, 2] = 1  # client 15's; block b begins with client ⌊100 b/64⌋: block 10 with 15 and block 11 with 17
    second = fingerprint.of_samples(fb.Clients(rows), current_group())["outer"]
    assert [number for number in range(64) if first[number] != second[number]] == [10]
    assert fingerprint.clients_of([10], 100) == "clients 15 to 16"
    assert fingerprint.of_tree(jnp.zeros(5000)) != fingerprint.of_tree(jnp.zeros(5000).at[1].set(1))


def test_the_type_and_the_shape_of_an_array_count():
    """Arrays with the same bytes and another type or shape differ, here four zeros as a row, a column and integers."""
    row, column, whole = np.zeros((1, 4)), np.zeros((4, 1)), np.zeros((1, 4), np.int64)
    assert len({kept.of_array(array) for array in (row, column, whole)}) == 3


def test_of_a_large_mapped_array_evenly_spaced_samples_are_read(monkeypatch, tmp_path):
    """Of a large memory-mapped array, evenly spaced samples are read.

    1,000 clients with 100 samples are 64 blocks of 1,562 or 1,563 samples. 32 samples of each block are read, with the
    first and the last. The blocks begin with client ⌊1000 b/64⌋: 0, 15, 31, 46, …
    """
    monkeypatch.setattr(fingerprint, "WHOLE", 2**16)
    values = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, (100_000, 3))
    rows = Ragged({"a": values}, np.arange(1000) * 100, np.full(1000, 100))
    first = fingerprint.of_samples(fb.Clients(rows), current_group())
    assert first["inner"] == first["outer"]  # both losses read the same samples
    assert len(first["outer"]) == 64
    values[1500] = 1  # client 15's first sample is the first of the second block
    second = fingerprint.of_samples(fb.Clients(rows), current_group())
    assert [old != new for old, new in zip(first["outer"], second["outer"], strict=True)] == [False, True] + 62 * [
        False
    ]
    assert fingerprint.clients_of([1, 2, 63], 1000) == "clients 15 to 45, 984 to 999"
    values[1501] = 1  # not read: the second sample of its block, of which every 50th or so is read
    assert fingerprint.of_samples(fb.Clients(rows), current_group()) == second


PROGRAMS = """
import jax, jax.numpy as jnp, numpy as np
from fedbilevel.engines import fingerprint
from fedbilevel.engines.process_group import current_group

@jax.custom_vjp
def clipped(x):
    return x
clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
table = np.arange(12.0).reshape(3, 4)

def loss(x):
    y = jax.nn.relu(x) + jax.nn.silu(clipped(x)) + jax.jit(lambda u: u @ table)(x[:3]).sum()
    y, _ = jax.lax.scan(lambda c, t: (c * t, None), y, jnp.arange(3.0))
    y = jax.lax.cond(y[0] > 0, jnp.sin, jnp.cos, y)
    y = jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, y)
    return jax.checkpoint(jnp.exp)(y).mean() + jax.random.normal(jax.random.key(3))

print(fingerprint.of_program(jax.make_jaxpr(loss)(jnp.ones(4))))
"""


def test_a_loss_has_the_same_hash_in_every_process():
    there = subprocess.run(
        [sys.executable, "-c", PROGRAMS],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    here: list[str] = []
    exec(PROGRAMS, {"print": here.append})
    assert there.stdout == f"{here[0]}\n"


@pytest.fixture
def begun(tmp_path):
    """Return a function that continues a checkpoint of three rounds."""
    clients = fb.Clients(SAMPLES, SAMPLES)
    problem = fb.Bilevel(fit, ridge)

    def play(rounds, problem=problem, x0=0.0, path=tmp_path / "run.npz", algorithm=None, **options):
        start = jnp.asarray(x0), jnp.zeros(2)
        return fb.solve(
            algorithm or fixed(fb.SimFBO()), problem, clients, *start, rounds=rounds, checkpoint=path, **options
        )

    play(3)
    return play


def test_other_arguments_are_refused_unless_forced(begun, tmp_path):
    refusal = partial(raises_with, fb.errors.CheckpointError, path=tmp_path / "run.npz", remedy=FORCE)
    with refusal(differences={"x0": None, "inner loss": None}):
        begun(6, fb.Bilevel(fit, softer), x0=1.0, resume=True)
    with refusal(differences={"inner loss": None}):
        begun(6, fb.Bilevel(fit, softer), resume="auto")
    with warns_with(fb.errors.CheckpointWarning, path=tmp_path / "run.npz", differences={"inner loss": None}):
        forced = begun(6, fb.Bilevel(fit, softer), resume="force")
    assert forced.round == 6
    # the checkpoint now belongs to the run with the other loss
    assert begun(9, fb.Bilevel(fit, softer), resume=True).round == 9


def test_auto_starts_or_continues(begun, tmp_path):
    whole = begun(6, path=tmp_path / "other.npz", resume="auto")
    assert whole.round == 6
    again = begun(6, resume="auto")
    assert again.round == 6
    assert np.array_equal(again.y, whole.y)
    with refuses("resume", "maybe", "True, False, 'auto' or 'force'"):
        begun(6, resume="maybe")


def test_no_resume_passes_one_algorithms_state_to_another(begun, tmp_path):
    """One algorithm's state is never passed to another, not even by force, and the error names both.

    A list of different leaves would say little to a user who has mistyped a name.
    """
    for resume in (True, "force"):
        differences = {"algorithm": ("SimFBO", "FedNest")}
        with raises_with(
            fb.errors.CheckpointError, path=tmp_path / "run.npz", differences=differences, remedy=START_ANEW
        ):
            begun(4, algorithm=fixed(fb.FedNest(batch_size=2)), resume=resume)


OF_X, OF_Y = fb.Metric(lambda x, y: x**2, larger_is_better=False), lambda x, y, batch: (y**2).sum()
METRICS = {"fit": OF_X, "more": OF_X}
OTHERS = {
    "another function": ({"fit": fb.Metric(lambda x, y: x**4, larger_is_better=False)}, {}, "metric fit"),
    "another direction": ({"fit": fb.Metric(OF_X.function, larger_is_better=True)}, {}, "metric fit"),
    "another function per client": ({}, {"risk": lambda x, y, batch: (y**4).sum()}, "metric risk"),
    "other samples": ({}, {"risk": fb.PerClient(OF_Y, "inner")}, "metric risk"),
    "another direction per client": ({}, {"risk": fb.PerClient(OF_Y, larger_is_better=True)}, "metric risk"),
}


def measured(path, metrics, per_client, **given):
    clients, method = fb.Clients(SAMPLES, SAMPLES), fixed(fb.SimFBO(local_steps=1))
    fb.solve(method, fb.Bilevel(fit, ridge), clients, jnp.zeros(()), jnp.zeros(2), metrics=metrics,
             metrics_per_client=per_client, checkpoint=path, **given)  # fmt: skip


@pytest.fixture(scope="module")
def with_metrics(tmp_path_factory):
    path = tmp_path_factory.mktemp("metrics") / "run.npz"
    measured(path, METRICS, {"risk": OF_Y}, rounds=1)
    return path


@pytest.mark.parametrize("case", OTHERS)
def test_another_metric_of_the_same_name_is_refused(with_metrics, case):
    metrics, per_client, name = OTHERS[case]
    with raises_with(fb.errors.CheckpointError, path=with_metrics, differences={name: None}):
        measured(with_metrics, {**METRICS, **metrics}, {"risk": OF_Y, **per_client}, rounds=1, resume=True)


def test_the_same_metric_may_be_written_otherwise_and_others_come_and_go(with_metrics):
    same = fb.Metric(lambda a, b: a**2, larger_is_better=False)
    measured(with_metrics, {"fit": same, "new": OF_X}, None, rounds=1, resume=True)
