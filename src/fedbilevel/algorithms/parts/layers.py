"""Layers: what happens around every exchange of a method, whatever the method is.

A layer has a function for the server and one for a client, each around what is inside, and one for the end of a round:

    server   exchange(asked, kept, ask)          `ask` sends a message on, toward the wire, and returns a `Total`
    client   reply(asked, kept, client, run)     `run` runs what is inside: other layers, and then the phase
    server   after_round(…, before, after)       returns the state at the end of a round

On either side it may keep something (`server_slot`, `client_slot`), which is carried from exchange to exchange and from
round to round, beside what the method keeps. No layer knows of another.

All layers of a run are in one `Layered`, which `layered` makes. It has a field for each place. The order of the fields
is that of the layers around a phase: what never leaves a client is taken out before the rest is noised, and codes work
on what has been noised, so that they cost no privacy. A rule acts at the server alone, and the state at the end of a
round.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from jax import Array

from fedbilevel.algorithms.parts.wrappers import KeepingFed, Wrapper
from fedbilevel.core.algorithm import Algorithm, Part, refuse_unless_allowed
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.facts import Allows, Findings, No
from fedbilevel.core.fed import Fed, Phase, Reply, Total
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree


@dataclass(frozen=True)
class Asked:
    """An exchange, as a layer sees it on either side.

    Args:
        method: the method inside.
        phase: the name of its phase.
        message: what is sent to clients.
        key: the random key of the exchange at the server, of a client's phase at the client.
        fresh: at the server, the number of a fresh cohort, whose clients keep nothing; None for the round's own.
        each: at the server, whether the total must have every reply.
    """

    method: Algorithm
    phase: str
    message: PyTree
    key: Array
    fresh: Any = None
    each: bool = False


PLACES = "kept", "privacy", "rule", "coded", "state"
Kept = Any
Ask = Callable[[Asked], Total]
Inside = Callable[[Client, PyTree], Reply]


class Layer(Part):
    """Base class of layers: what happens around every exchange of a method. A subclass gives what it changes."""

    kind: ClassVar[str]
    """Its name, by which what it keeps is found."""

    place: ClassVar[str]
    """The field of `Layered` that it takes: one of PLACES."""

    needs: ClassVar[str] = ""
    """The entry of `Allows` that a method must give."""

    cannot: ClassVar[str] = ""
    """What a method without that entry cannot do; the words of the error."""

    excludes: ClassVar[Mapping[str, str]] = {}
    """Kinds of layers that exclude it, each with the reason."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not inspect.isabstract(cls):
            where = cls.__name__
            require(isinstance(getattr(cls, "kind", None), str), f"{where}.kind", getattr(cls, "kind", None), "a name")
            require(
                getattr(cls, "place", None) in PLACES, f"{where}.place", getattr(cls, "place", None), ", ".join(PLACES)
            )
            require(cls.needs in ("", *Allows._fields), f"{where}.needs", cls.needs, ", ".join(Allows._fields))

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        """Raise ConfigurationError for a problem, or for clients, that the layer does not fit."""

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> PyTree:
        """What the server keeps for it; None: nothing."""
        return None

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        """What each client keeps for it; None: nothing."""
        return None

    def exchange(self, asked: Asked, kept: Kept, ask: Ask) -> tuple[Total, Kept]:
        """At the server: ask, and return what came, and what to keep now."""
        return ask(asked), kept

    def reply(self, asked: Asked, kept: Kept, client: Client, run: Inside) -> tuple[Reply, Kept]:
        """At a client: run what is inside, and return its reply, and what to keep now. `kept` is None in a fresh
        cohort, where what a client keeps is out of reach."""
        return run(client, asked.message), kept

    def after_round(self, method: Algorithm, problem: Problem, kept: Kept, before: Any, after: Any) -> tuple[Any, Kept]:
        """At the server: the state at the end of a round."""
        return after, kept


class LayeredState(NamedTuple):
    """The server's state, where layers keep something there."""

    inside: Any
    slots: dict[str, Any]  # by the kind of layer

    @property
    def x(self) -> PyTree:
        return self.inside.x

    @property
    def y(self) -> PyTree:
        return self.inside.y


class LayeredClient(NamedTuple):
    """A client's state, where layers keep something there."""

    inside: PyTree
    slots: dict[str, Any]


class Layered(Wrapper):
    """A method with layers around its exchanges: one at each place, from the phase to the wire.

    Args:
        algorithm: the method.
        kept: what never leaves a client.
        privacy: what hides its data.
        rule: what takes the place of the mean of all replies.
        coded: what makes replies short.
        state: what is done with the state at the end of a round.
    """

    kept: Layer | None = None
    privacy: Layer | None = None
    rule: Layer | None = None
    coded: Layer | None = None
    state: Layer | None = None

    def validate(self) -> None:
        """Refuse a layer that the method, or another layer, does not allow."""
        known = self.algorithm
        for layer in self.layers:
            name, others = type(layer).__name__, {other.kind: other for other in self.layers}
            require(getattr(self, layer.place) is layer, f"Layered.{layer.place}", name, "a layer of that place")
            require(others[layer.kind] is layer, f"{name}.kind", layer.kind, "another for each layer")
            if layer.needs:
                refuse_unless_allowed(known, layer.needs, layer.cannot or f"cannot have {name}")
            for kind, why in layer.excludes.items():
                if kind in others:
                    raise ConfigurationError(f"{name} and {type(others[kind]).__name__} cannot be together: {why}")

    @property
    def layers(self) -> tuple[Layer, ...]:
        """From the phase to the wire."""
        every = self.kept, self.privacy, self.rule, self.coded, self.state
        return tuple(layer for layer in every if layer is not None)

    @property
    def allows(self) -> Allows:
        if not self.whole:
            return self.algorithm.allows
        late, parts = No(f"{self.whole} needs replies of one exchange"), No(f"{self.whole} needs whole replies")
        return self.algorithm.allows._replace(late=late, submodels=parts)

    @property
    def whole(self) -> str:
        """Name the layer that needs whole replies of one exchange, a rule or a code; or ""."""
        return next((type(layer).__name__ for layer in (self.rule, self.coded) if layer is not None), "")

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        if self.whole:
            path = f"{self.algorithm.label} with {self.whole}"
            require(not self.algorithm.asks.asynchronous, path, "late replies", "a method that waits for everyone")
            require(clients.capacity is None, "Clients.capacity", "given", f"None with {self.whole}: replies are whole")
        for layer in self.layers:
            layer.check(self.algorithm, problem, clients, x, y)
        self.algorithm.check(problem, clients, x, y)

    def slots(self, make: str, *given: Any) -> dict[str, Any]:
        """What the layers keep on one side, without those that keep nothing."""
        made = {layer.kind: getattr(layer, make)(self.algorithm, *given) for layer in self.layers}
        return {kind: slot for kind, slot in made.items() if slot is not None}

    def init(self, x: PyTree, y: PyTree) -> Any:
        inside, slots = self.algorithm.init(x, y), self.slots("server_slot", x, y)
        return LayeredState(inside, slots) if slots else inside

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        inside, slots = self.algorithm.client_state(problem, x, y), self.slots("client_slot", problem, x, y)
        return LayeredClient(inside, slots) if slots else inside

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        before = _parted(state, LayeredState)
        layers = LayersFed(fed, self, before.slots)
        inside, slots = self.algorithm.round(layers, before.inside, key), dict(layers.kept)
        for layer in self.layers:
            own = slots.get(layer.kind)
            inside, slot = layer.after_round(self.algorithm, fed.problem, own, before.inside, inside)
            slots |= {} if slot is None else {layer.kind: slot}
        return LayeredState(inside, slots) if isinstance(state, LayeredState) else inside

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        slots = self.slots("server_slot", x, y)
        return self.algorithm.hypergradient_at(LayersFed(fed, self, slots), x, y, key)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        before = _parted(client.state, LayeredClient)
        slots = dict(before.slots)

        def run(depth: int, client: Client, message: PyTree) -> Reply:
            if depth == 0:
                return self.algorithm.run_phase(name, replace(client, state=before.inside), message, key)
            layer = self.layers[depth - 1]
            asked, own = Asked(self.algorithm, name, message, key), slots.get(layer.kind)
            reply, slot = layer.reply(asked, own, client, partial(run, depth - 1))
            slots.update({} if slot is None else {layer.kind: slot})
            return reply

        reply = run(len(self.layers), client, message)
        if not isinstance(client.state, LayeredClient):
            return reply
        inside = before.inside if reply.state is None else reply.state
        return reply._replace(state=LayeredClient(inside, slots))

    def finished(self, state: Any) -> Any:
        return self.algorithm.finished(_parted(state, LayeredState).inside)

    def findings(self, state: Any) -> Findings:
        return self.algorithm.findings(_parted(state, LayeredState).inside)

    def remarks(self, state: Any) -> tuple[str, ...]:
        return self.algorithm.remarks(_parted(state, LayeredState).inside)


def _parted(state: Any, kind: Any) -> Any:
    return state if isinstance(state, kind) else kind(state, {})


class LayersFed(KeepingFed):
    """The `Fed` of a method with layers; it keeps what they keep on the server."""

    def __init__(self, fed: Fed, method: Layered, slots: dict[str, Any]) -> None:
        super().__init__(fed, slots, fed.sampled)
        self.method = method

    def sum(self, phase: Phase, message: PyTree, key: Array, *, fresh: Any = None, each: bool = False) -> Total:
        def ask(asked: Asked) -> Total:
            return self.fed.sum(phase, asked.message, asked.key, fresh=asked.fresh, each=asked.each)

        return self.through(phase, message, key, ask, fresh, each)

    def sum_first(self, n: int, phase: Phase, message: PyTree, key: Array, **options: Any) -> PyTree:
        def ask(asked: Asked) -> Total:
            return Total.of_mean(self.fed.sum_first(n, phase, asked.message, asked.key, **options))

        return self.through(phase, message, key, ask).update

    def through(
        self, phase: Phase, message: PyTree, key: Array, ask: Ask, fresh: Any = None, each: bool = False
    ) -> Total:
        """Ask through all layers: the first sees the message as the method made it, and the total last."""
        for layer in reversed(self.method.layers):
            ask = partial(self.one, layer, ask)
        return ask(Asked(self.method.algorithm, self.method.phase_name(phase), message, key, fresh, each))

    def one(self, layer: Layer, ask: Ask, asked: Asked) -> Total:
        total, slot = layer.exchange(asked, self.kept.get(layer.kind), ask)
        if slot is not None:
            self.kept = {**self.kept, layer.kind: slot}
        return total


def layered(algorithm: Algorithm, *layers: Layer | None) -> Algorithm:
    """Return the method with these layers, each at its place; the method itself where there are none.

    Raises:
        ConfigurationError: the method, or another layer, does not allow one; two are of one place.
    """
    require(isinstance(algorithm, Algorithm), "layered: the method", algorithm, "a method, such as fb.SimFBO()")
    for layer in layers:
        allowed = "an instance of a subclass of authoring.Layer, such as fb.parts.TopK()"
        require(layer is None or isinstance(layer, Layer), "layered: a layer", layer, allowed)
    chosen: dict[str, Any] = {layer.place: layer for layer in layers if layer is not None}
    has = {} if not isinstance(algorithm, Layered) else {layer.place: layer for layer in algorithm.layers}
    if len(chosen) < len([*filter(None, layers)]) or chosen.keys() & has.keys():
        names = [type(layer).__name__ for layer in (*has.values(), *layers) if layer is not None]
        raise ConfigurationError(f"two layers of one place, among {', '.join(names)}")
    if isinstance(algorithm, Layered):
        return replace(algorithm, **chosen)
    return Layered(algorithm, **chosen) if chosen else algorithm


def innermost(algorithm: Algorithm, *layers: Layer | None) -> Algorithm:
    """Return the method with these layers within the wrappers that it has."""
    if isinstance(algorithm, Wrapper) and not isinstance(algorithm, Layered):
        return replace(algorithm, algorithm=innermost(algorithm.algorithm, *layers))
    return layered(algorithm, *layers)


def layers_of(algorithm: Algorithm) -> list[Layer]:
    """Find the layers of a method, also within the wrappers that it has."""
    own = list(algorithm.layers) if isinstance(algorithm, Layered) else []
    return own + (layers_of(algorithm.algorithm) if isinstance(algorithm, Wrapper) else [])


def require_whole_replies(path: str, algorithm: Algorithm) -> None:
    """Refuse a method whose replies are coded: their form has other numbers than the replies.

    Raises:
        ConfigurationError: it has a layer of the place "coded".
    """
    coded = [type(layer).__name__ for layer in layers_of(algorithm) if layer.place == "coded"]
    require(not coded, path, f"with {''.join(coded)}", "a method without a code, such as TopK, for its replies")


def slots_of(tree: PyTree, kind: str) -> list[Any]:
    """Find what the layers of a kind keep in the states of the server or of the clients."""
    is_slots = lambda node: isinstance(node, LayeredState | LayeredClient)  # noqa: E731
    found: list[Any] = []
    nodes = [node for node in jax.tree.leaves(tree, is_leaf=is_slots) if is_slots(node)]
    for node in nodes:
        found += [node.slots[kind]] if kind in node.slots else []
        found += slots_of(node.inside, kind)
    return found
