"""Does each layer ask once, run once and keep the structure of its state, and give the same on every engine?"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel import authoring, parts
from fedbilevel.algorithms.parts.adaptive_steps import Steps
from fedbilevel.algorithms.parts.curvature import Measured
from fedbilevel.algorithms.parts.in_set import InSet
from fedbilevel.algorithms.parts.layers import Asked, Layer, Layered, layered
from fedbilevel.algorithms.parts.memory import Memory, ReplyDelta
from fedbilevel.algorithms.parts.own_block import OwnBlock
from fedbilevel.algorithms.parts.own_leaves import OwnLeaves
from fedbilevel.algorithms.parts.private import Private
from fedbilevel.authoring import Public, Reply, Total
from fedbilevel.core.client import Client
from fedbilevel.core.tree import XYV
from fedbilevel.engines.reference import _samples
from fedbilevel.tasks.quadratic import quadratic
from refusals import ANY, refuses
from representatives import slow_but
from test_class_rules import below

METHOD = fb.SimFBO(local_steps=1, batch_size=None, server_lr=XYV(0.2, 0.1, 0.1), client_lr=0.1)
LAYERS = {
    "in_set": InSet(),
    "own_block": OwnBlock(),
    "own_leaves": OwnLeaves(),
    "private": Private(clip=1.0, noise_multiplier=0.5, delta=1e-5),
    "memory": Memory(compressor=parts.TopK(share=0.5), late=fb.Asynchronous(wait_for=2)),
    "adaptive_steps": fb.AdaptiveSteps(),
    "outer_optimizer": fb.OuterOptimizer(optimizer=optax.adam(0.1)),
    "trimmed_mean": parts.TrimmedMean(),
    "median": parts.Median(),
    "krum": parts.Krum(),
    "centred_clipping": parts.CentredClipping(),
}


def test_every_layer_is_tried():
    kinds = {cls.kind for cls in below(Layer) if hasattr(cls, "kind") and cls.__module__.startswith("fedbilevel.")}
    assert kinds == set(LAYERS)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_asks_once_runs_once_and_keeps_what_it_began_with(kind):
    """A layer calls `ask` once and `run` once, and keeps a state of the structure with which it began.

    If a layer called twice, the exchange would be paid for twice. If it never called, the reply would not be that of
    the method inside. The test computes nothing, since calls and structures do not depend on numbers.
    """
    assert jax.eval_shape(partial(calls_of, kind, [])) == ()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_says_what_leaves_a_client_because_of_it(kind):
    """A layer has a sentence `tells` if and only if replies have new parts or metrics, or the server needs each reply.

    `Memory` stands for `Asynchronous` and for compressors, which have sentences of their own.
    """
    jax.eval_shape(partial(calls_of, kind, more := []))
    assert bool(LAYERS[kind].tells) == bool(more)
    if kind == "memory":
        assert "" != parts.TopK.tells != fb.Asynchronous.tells == Memory.tells


def paths(tree):
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def calls_of(kind, more):
    """Make an exchange and a reply of the layer, and check its calls and structures.

    Add to the list `more` what a client sends more than without the layer, and "each" if the server needs each reply.
    """
    task, calls = quadratic(clients=6, dim_x=6, dim_y=3, samples=(2, 2)), []
    own = {"own_block": {"local": "x"}, "own_leaves": {"own": lambda path: True}}.get(kind, {"project_x": jnp.abs})
    problem = fb.Bilevel(task.problem.outer, task.problem.inner, **own)
    layer, x, y = LAYERS[kind], jnp.asarray(task.x0), jnp.asarray(task.y0)
    part = XYV(jnp.ones(6), jnp.ones(3), jnp.ones(3))
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf * i for i in range(6)]), part), jnp.full(6, 1 / 6)
    method = fb.SimFBO(local_steps=1, batch_size=None) if kind == "adaptive_steps" else METHOD
    phase = method.phase_name(method.local_updates)
    asked = Asked(method, phase, part, jax.random.key(0))
    samples = [_samples(name, task.clients, 0) for name in ("outer", "inner")]
    client = Client(problem, *samples, id=jnp.asarray(0), weight=jnp.asarray(0.5), state=None)

    def ask(again):
        calls.append("ask")
        more.extend(["each"] * again.each)
        update = part
        if kind == "memory":
            update = ReplyDelta((part, jax.tree.map(lambda _: None, part)), *[Public(jnp.ones(()))] * 2)
        if kind == "adaptive_steps":
            update = part, Measured(*jnp.ones(len(Measured._fields)))
        return Total(update, jnp.ones(()), jnp.asarray(6), 6, rows=rows if again.each else None)

    def run(again, client):
        calls.append("run")
        return Reply(part)

    kept = layer.server_slot(method, x, y)
    total, after = layer.exchange(asked, kept, ask)
    assert jax.tree.structure(after) == jax.tree.structure(kept)
    assert isinstance(total, Total)
    kept = layer.client_slot(method, problem, x, y)
    asked = {
        "memory": replace(asked, message=(part, jnp.asarray(0))),
        "adaptive_steps": replace(asked, message=(part, Steps(*jnp.ones(2), jnp.asarray(1, jnp.uint32)))),
    }.get(kind, asked)
    reply, after = layer.reply(asked, kept, client, run)
    assert jax.tree.structure(after) == jax.tree.structure(kept)
    assert isinstance(reply, Reply)
    assert calls == ["ask", "run"]
    more.extend(sorted(paths(reply.update) - paths(part)) + sorted(reply.metrics or {}))
    return ()


PAIRS = {
    "top-k": (layered(METHOD, parts.TopK(share=0.3)), None),
    "top-k, privacy": (layered(METHOD, parts.TopK(share=0.3)), fb.Privacy(clip=1.0, noise_multiplier=0.3, delta=1e-5)),
    "trimmed mean": (layered(METHOD, parts.TrimmedMean()), None),
    "median": (layered(METHOD, parts.Median()), None),
    "Krum": (layered(METHOD, parts.Krum()), None),
    "centred clipping, steps that adapt": (
        layered(fb.SimFBO(batch_size=None), parts.CentredClipping(radius=9.0)),
        None,
    ),
    "centred clipping, FedNest": (layered(fb.FedNest(batch_size=None), parts.CentredClipping(radius=9.0)), None),
}


@pytest.mark.parametrize("case", slow_but("trimmed mean", of=PAIRS))
def test_engines_agree(case):
    """Engines agree on layers, with x in a set and cohorts of 5 of 7 unlike clients, which chunks and devices pad."""
    method, privacy = PAIRS[case]
    task = quadratic(clients=7, dim_x=4, dim_y=3, samples=(3, 3))
    problem = fb.Bilevel(task.problem.outer, task.problem.inner, project_x=lambda x: jnp.clip(x, -0.5, 0.5))

    def run(engine):
        given = problem, task.clients, task.x0, task.y0
        return fb.solve(method, *given, rounds=3, cohort=5, key=4, engine=engine, privacy=privacy)

    expected = run(fb.Reference())
    assert np.max(np.abs(np.asarray(expected.x) - task.x0)) > 1e-3
    found = run(fb.Local(devices=2, chunk=2))
    np.testing.assert_allclose(found.x, expected.x, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.y, expected.y, rtol=1e-10, atol=1e-12)
    assert found.ledger == expected.ledger


def coded(tree, code):
    """Return a tree with `code` of each leaf of floating-point numbers."""
    return jax.tree.map(lambda leaf: code(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, tree)


class Doubled(Layer):
    """Double messages and replies on their way, and halve them at the other side; count exchanges and replies."""

    kind, place = "doubled", "kept"

    def server_slot(self, method, x, y):
        return jnp.zeros((), jnp.int32)

    def client_slot(self, method, problem, x, y):
        return jnp.zeros((), jnp.int32)

    def exchange(self, asked, kept, ask):
        total = ask(replace(asked, message=coded(asked.message, lambda leaf: 2 * leaf)))
        return total._replace(update=coded(total.update, lambda leaf: leaf / 2)), kept + 1

    def reply(self, asked, kept, client, run):
        reply = run(replace(asked, message=coded(asked.message, lambda leaf: leaf / 2)), client)
        return reply._replace(update=coded(reply.update, lambda leaf: 2 * leaf)), kept + 1

    def findings(self, method, kept, found):
        return found._replace(columns=found.columns | {"counted": kept})


class Raised(Layer):
    """Add 1 to messages and replies on their way, and subtract it at the other side."""

    kind, place = "raised", "outer"

    def exchange(self, asked, kept, ask):
        total = ask(replace(asked, message=coded(asked.message, lambda leaf: leaf + 1)))
        return total._replace(update=coded(total.update, lambda leaf: leaf - total.weight)), kept

    def reply(self, asked, kept, client, run):
        reply = run(replace(asked, message=coded(asked.message, lambda leaf: leaf - 1)), client)
        return reply._replace(update=coded(reply.update, lambda leaf: leaf + 1)), kept


@pytest.mark.parametrize(
    ("method", "engine"),
    slow_but((TwoPhase(), fb.Local()), of=[(METHOD, fb.Reference()), (TwoPhase(), fb.Local())]),
    ids=["SimFBO", "a loop and clients' states"],
)
def test_messages_pass_layers_to_the_network_and_replies_pass_them_back(method, engine):
    """Two layers whose codes do not commute change nothing, if each side applies them in the reverse order.

    A message m arrives as ((2m + 1) − 1)/2; if one side had the other order, it would arrive as m ± ½. In the second
    method, exchanges are in a loop, clients keep states, and there are both kinds of means. So the layers' states have
    to pass the loop, and the states of its clients have to stay beside those of the layers.
    """
    task = quadratic(clients=4, samples=(4, 4))
    given = task.problem, task.clients, task.x0, task.y0
    plain, both = (
        fb.solve(one, *given, rounds=2, cohort=3, engine=engine)
        for one in (method, layered(method, Doubled(), Raised()))
    )
    assert np.abs(plain.x - task.x0).max() > 1e-3
    np.testing.assert_allclose(both.x, plain.x, rtol=1e-9)
    np.testing.assert_allclose(both.y, plain.y, rtol=1e-9)
    assert both.history["counted"][-1] == plain.ledger.exchanges


class ShorterOnX(Layer):
    """Let the server make shorter steps on x in each round."""

    kind, place = "shorter_on_x", "steps"

    def before_round(self, method, kept):
        return replace(method, server_lr=method.server_lr._replace(x=0.1)), kept


class ShorterOnY(Layer):
    """Let the server make shorter steps on y in each round."""

    kind, place = "shorter_on_y", "outer"

    def before_round(self, method, kept):
        return replace(method, server_lr=method.server_lr._replace(y=0.05)), kept


def test_a_round_runs_with_the_changes_of_all_layers_to_the_method():
    task = quadratic(clients=4, samples=(3, 3))
    given = task.problem, task.clients, task.x0, task.y0
    shorter = replace(METHOD, server_lr=METHOD.server_lr._replace(x=0.1, y=0.05))
    expected, found = (
        fb.solve(method, *given, rounds=2, engine=fb.Reference())
        for method in (shorter, layered(METHOD, ShorterOnX(), ShorterOnY()))
    )
    np.testing.assert_allclose(found.x, expected.x, rtol=1e-12)
    np.testing.assert_allclose(found.y, expected.y, rtol=1e-12)


def rows():
    """Return the replies of 6 clients and two rows of padding, and their weights, which are 0 for padding."""
    r = np.random.default_rng(3)
    return np.concatenate([r.normal(size=(6, 5)), 1e6 * np.ones((2, 5))]), np.array(
        [0.3, 0.1, 0.2, 0.2, 0.15, 0.05, 0, 0]
    )


def test_rules_are_those_written_out():
    """Each rule equals its definition in NumPy over the rows that are not padding."""
    of, weights = rows()
    real, p = of[:6], weights[:6]
    ascending = np.sort(real, axis=0)
    np.testing.assert_allclose(parts.TrimmedMean(trim=2).of(of, weights), ascending[2:4].mean(0), rtol=1e-12)
    median = [min(v for v in column if p[column <= v].sum() >= 0.5) for column in real.T]
    np.testing.assert_allclose(parts.Median().of(of, weights), median, rtol=1e-12)
    for draw in range(10):  # in some of these draws another reply would win if other neighbours counted
        drawn = np.concatenate([np.random.default_rng(draw).normal(size=(6, 5)), of[6:]])
        squares = ((drawn[:6, None] - drawn[None, :6]) ** 2).sum(-1)
        score = [np.sort(np.delete(squares[i], i))[: 6 - 1 - 2].sum() for i in range(6)]
        np.testing.assert_allclose(parts.Krum(bad=1).of(drawn, weights), drawn[np.argmin(score)], rtol=1e-12)
    v = np.array(median)
    for _ in range(3):
        away = real - v
        v = v + p @ (away * np.minimum(1, 0.8 / np.linalg.norm(away, axis=1, keepdims=True)))
    np.testing.assert_allclose(parts.CentredClipping(radius=0.8).of(of, weights), v, rtol=1e-12)


@pytest.mark.parametrize("count", [10, 18, 50])
def test_the_median_of_an_even_number_of_equal_weights_is_the_lower_middle_one(count):
    """The median of an even number of equal weights is the lower middle one, in spite of rounding errors in float32."""
    weights, ranks = jnp.full(count, 1 / count, jnp.float32), jnp.arange(count, dtype=jnp.float32)[:, None]
    assert parts.Median().of(ranks, weights) == count / 2 - 1


def test_a_reply_that_is_not_finite_is_a_bad_one_as_well():
    """Each rule leaves out a reply that is not finite, and gives NaN if there are fewer replies than it needs."""
    of, weights = rows()
    for bad in (np.nan, np.inf, -np.inf):
        with_it = np.where(np.arange(8)[:, None] == 2, bad, of)
        for kind in ("trimmed_mean", "median", "krum", "centred_clipping"):
            assert np.isfinite(LAYERS[kind].of(jnp.asarray(with_it), jnp.asarray(weights))).all(), (kind, bad)
    few = jnp.asarray(np.where(np.arange(8) < 3, weights, 0))
    assert np.isnan(parts.Krum(bad=1).of(jnp.asarray(of), few)).all()
    assert np.isnan(parts.TrimmedMean(trim=2).of(jnp.asarray(of), few)).all()


def liar(away):
    """Return a problem with y* = x + the mean of the clients' c, its clients, and x* = −mean c/1.1 of the others.

    The c of the last client is off by `away`.
    """
    center = np.random.default_rng(0).normal(size=(8, 3)) * 0.1
    center[-1] += away
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.vdot(y, y) / 2 + jnp.vdot(x, x) / 20,
        lambda x, y, batch: jnp.mean(jnp.sum((y - x - batch["c"]) ** 2, 1)) / 2,
    )
    return problem, fb.Clients([{"c": row[None]} for row in center]), -center[:-1].mean(0) / 1.1


@pytest.mark.parametrize("kind", slow_but("median", of=["trimmed_mean", "median", "krum", "centred_clipping"]))
def test_one_bad_client_of_eight_does_not_move_x_far(kind):
    """With each rule, one bad client of eight moves x by less than 0.3; without a rule, by more than 1,000.

    The mean is off by an eighth of 10,000. A rule leaves an error within the spread of the clients, 0.1, or of a few τ.
    """
    problem, clients, best = liar(1e4)
    given = problem, clients, jnp.zeros(3), jnp.zeros(3)
    rule = parts.CentredClipping(radius=0.1) if kind == "centred_clipping" else LAYERS[kind]
    method = fb.SimFBO(local_steps=1, batch_size=None, server_lr=0.1, client_lr=0.1)
    off = [float(np.linalg.norm(fb.solve(one, *given, rounds=300).x - best)) for one in (method, layered(method, rule))]
    assert off[0] > 1000
    assert off[1] < 0.3


class Eight(Layer):
    kind, place = "eight", "coded"


class LateOfMine(Layer):
    kind, place = "late_of_mine", "late"


class EveryReply(Layer):
    kind, place = "every_reply", "rule"

    def exchange(self, asked, kept, ask):
        updates, _ = ask(replace(asked, each=True)).rows
        return Total.of_mean(jax.tree.map(lambda rows: rows[0], updates)), kept


class BareReply(Layer):
    kind, place = "bare_reply", "kept"

    def reply(self, asked, kept, client, run):
        return run(asked, client)


class KeepsAtOnce(Layer):
    kind, place = "keeps_at_once", "kept"

    def exchange(self, asked, kept, ask):
        return ask(asked), jnp.ones(())


class OneEntry(authoring.Compressor):
    def coded(self, tree):
        return jax.tree.map(lambda leaf: leaf[:1], tree)


class Telling(Layer):
    """A layer with a metric of its own, or with a column in its findings."""

    kind, place = "telling", "privacy"

    metric: object = authoring.static(default=None)
    column: object = authoring.static(default=None)

    def reply(self, asked, kept, client, run):
        reply, kept = super().reply(asked, kept, client, run)
        return (reply if self.metric is None else reply._replace(metrics={"mine": jnp.asarray(self.metric)})), kept

    def findings(self, method, kept, found):
        return found if self.column is None else found._replace(columns={"mine": np.asarray(self.column)})


REFUSED = {
    "metric": ("", ANY, "the metric 'mine' ", "", "Telling.reply"),
    "column": ("the column 'mine' of findings", "2 numbers"),
}


@pytest.mark.parametrize("engine", slow_but(None, of=[None, fb.Reference()]))
@pytest.mark.parametrize("field", slow_but("column", of=REFUSED))
def test_several_numbers_are_no_metric_of_a_layer(field, engine):
    task = quadratic(clients=4)
    few = task.problem, task.clients, task.x0, task.y0
    result = fb.solve(layered(METHOD, Telling(**{field: 3.0})), *few, rounds=1, engine=engine)
    np.testing.assert_allclose(result.history["mine"], [3, 3] if field == "column" else [np.nan, 3], rtol=1e-14)
    with refuses(*REFUSED[field]):
        fb.solve(layered(METHOD, Telling(**{field: (3.0, 4.0)})), *few, rounds=1, engine=engine)


class TwoOfAKind(Layer):
    kind, place = "memory", "privacy"


def test_what_cannot_be_together_says_why():
    task = quadratic(clients=4)
    few = task.problem, task.clients, task.x0, task.y0
    own_x = fb.Bilevel(task.problem.outer, task.problem.inner, local="x")
    half = fb.Clients(task.clients.outer, task.clients.inner, capacity=0.5)
    optimized = fb.OuterOptimizer(METHOD, optimizer=optax.sgd(1.0))

    def played(*layers):
        return fb.solve(layered(METHOD, *layers), *few, rounds=1)

    for make, refusal in (
        (lambda: layered(METHOD, parts.Median(), parts.Krum()), ("", ANY, "'rule': Median and Krum")),
        (lambda: layered(METHOD, parts.Median(), parts.TopK()), ("", ANY, "Median and TopK ")),
        (lambda: Layered(METHOD, rule=parts.TopK()), ("Layered.rule", "TopK")),
        (
            lambda: layered(fb.FedNest(batch_size=None), parts.TopK()),
            ("", ANY, "FedNest cannot send differences from earlier replies (TopK)"),
        ),
        (
            lambda: fb.Asynchronous(layered(METHOD, parts.Median()), wait_for=2),
            ("", ANY, "Median and Asynchronous "),
        ),
        (lambda: fb.Submodels(layered(METHOD, parts.Median())), ("", ANY, "SimFBO cannot be given Submodels: Median ")),
        (lambda: layered(fb.Asynchronous(METHOD, wait_for=2), Eight()), ("", ANY, "authoring.Compressor")),
        (
            lambda: Layered(layered(METHOD, parts.Median()), late=fb.Asynchronous(wait_for=2)),
            ("Layered.algorithm", "in layers", "layered"),
        ),
        (lambda: parts.Krum(bad=0), ("Krum.bad", 0)),
        (lambda: layered(METHOD, parts.TopK), ("layered: a layer", ANY, "authoring.Layer")),
        (lambda: layered(3, parts.TopK()), ("layered: the method", 3)),
        (lambda: fb.reply_norms(layered(METHOD, parts.TopK()), *few), ("algorithm", "with TopK")),
        (
            lambda: layered(METHOD, TwoOfAKind(), parts.TopK()),
            ("", ANY, "TwoOfAKind and TopK are both of the kind 'memory'"),
        ),
        (lambda: layered(fb.ADBO(wait_for=2), parts.Median()), ("Median, its method", "ADBO with first replies")),
        (
            lambda: fb.solve(layered(METHOD, parts.Median()), few[0], half, *few[2:], rounds=1),
            ("Clients.capacity", "given", "Median"),
        ),
        (
            lambda: fb.solve(optimized, own_x, *few[1:], rounds=1),
            ("", ANY, "Bilevel.local = 'x'"),
        ),
        (
            lambda: fb.solve(fb.SimFBO(batch_size=None), own_x, *few[1:], rounds=1),
            ("", ANY, "server_lr.x, server_lr.y"),
        ),
        (lambda: played(EveryReply(), parts.TopK()), ("", ANY, "TopK sends differences")),
        (
            lambda: played(EveryReply(), fb.Asynchronous(wait_for=2)),
            ("", ANY, "Asynchronous sends differences"),
        ),
        (
            lambda: fb.solve(layered(fb.ADBO(wait_for=2), EveryReply()), *few, rounds=1),
            ("", ANY, "first replies", "", "ADBO"),
        ),
        (
            lambda: played(BareReply()),
            ("", ANY, "BareReply.reply returned Reply "),
        ),
        (lambda: played(KeepsAtOnce()), ("", ANY, "KeepsAtOnce.exchange keeps float")),
        (
            lambda: played(OneEntry()),
            ("", ANY, ".x is float64[1], not float64[5]", "", "OneEntry.coded"),
        ),
        (
            lambda: fb.solve(layered(METHOD, Eight()), few[0], half, *few[2:], rounds=1),
            ("Clients.capacity", "given", "Eight"),
        ),
        (lambda: fb.solve(fb.Asynchronous(wait_for=2), *few, rounds=1), ("algorithm", ANY, "fb.layered(SimFBO(), …)")),
        (lambda: fb.Asynchronous(METHOD, 2), ("Asynchronous(…)", (2,))),
        (lambda: fb.OuterOptimizer(optax.adam(0.1)), ("OuterOptimizer(…)",)),
        (lambda: parts.TopK(share="a"), ("TopK.share", "a")),
        (
            lambda: type("Misspelt", (Layer,), {"kind": "x", "place": "kept", "exchanges": print}),
            ("", ANY, "did you mean 'exchange'"),
        ),
        (lambda: type("Elsewhere", (authoring.Compressor,), {"place": "codes"}), ("Elsewhere.place", "codes")),
        (lambda: type("Nowhere", (Layer,), {"kind": "nowhere", "place": "nowhere"}), ("Nowhere.place", "nowhere")),
        (lambda: fb.solve(layered(METHOD, parts.Krum()), *few, rounds=1), ("cohort", ANY, "5 replies")),
        (
            lambda: fb.solve(layered(METHOD, parts.TrimmedMean(trim=2)), *few, rounds=1),
            ("cohort", ANY, "5 replies"),
        ),
        (
            lambda: fb.solve(layered(fb.SimFBO(batch_size=None), parts.TopK()), *few, rounds=1),
            ("", ANY, "SimFBO cannot send differences from earlier replies (TopK)"),
        ),
    ):
        with refuses(*refusal):
            make()


def test_layers_are_at_their_places_whatever_their_order():
    assert layered(METHOD, None) is METHOD
    both = layered(layered(METHOD, InSet()), parts.Median())
    assert [layer.kind for layer in both.layers] == ["median", "in_set"]
    late = layered(fb.Asynchronous(METHOD, wait_for=2), parts.TopK(share=0.5))
    assert late == fb.Asynchronous(layered(METHOD, parts.TopK(share=0.5)), wait_for=2)
    assert late == layered(METHOD, fb.Asynchronous(wait_for=2), parts.TopK(share=0.5))
    assert [layer.kind for layer in late.layers] == ["memory"]
    submodels = fb.Submodels(METHOD, policy="random")
    assert layered(submodels, InSet()) == fb.Submodels(layered(METHOD, InSet()), policy="random")
    assert [layer.kind for layer in layered(METHOD, LateOfMine(), parts.TopK()).layers] == ["memory", "late_of_mine"]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [parts.TopK(share=1.0), fb.Asynchronous(wait_for=4)])
def test_an_estimate_needs_replies_to_its_own_message(layer):
    task, local = quadratic(clients=4, samples=(5, 5)), parts.LocalImplicit(solver=parts.Neumann(step=0.1))
    method = layered(
        fb.LFedNest(batch_size=None, hypergradient=local, inner=fb.parts.LocalSGD(lr=0.1), outer_lr=0.1), layer
    )
    with refuses("LFedNest.hypergradient_at", f"with {type(layer).__name__}"):
        fb.check_hypergradient(task.problem, task.clients, task.x0, task.y0, estimators={"short": method})
