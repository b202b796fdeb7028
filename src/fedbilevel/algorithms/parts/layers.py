"""Define layers, which change what happens around every exchange of a method, and do not depend on the method.

A layer has a function for an exchange on the server, one for a reply at a client, and two for a round:

    server   before_round(method, kept)          returns the method as the round runs it
    server   exchange(asked, kept, ask)          `ask` sends a message toward the clients, and returns a `Total`
    client   reply(asked, kept, client, run)     `run` runs the layers inside and then the phase
    server   after_round(…, before, after)       returns the state at the end of a round

On each side a layer may keep a state (`server_slot`, `client_slot`) between exchanges and rounds. Layers do not depend
on each other, with two exceptions: `excludes`, and the memory of last replies, which late and short replies share.

`layered` puts all layers of a run in one `Layered`. This object has a field for each place, and the order of the fields
is the order of the layers around a phase. Parts that never leave a client are removed first; then the rest gets noise,
and then replies are coded. A robust rule acts only on the server. The layers at the last two places act at the end of a
round.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from jax import Array

from fedbilevel.algorithms.parts.layer_checks import (
    Noted,
    check_declared,
    check_functions,
    check_names_and_attributes,
    checked,
    first_slot,
)
from fedbilevel.algorithms.parts.slots import (
    At,
    LayeredClient,
    LayeredState,
    Slots,
    client_parts,
    server_parts,
    with_slot,
)
from fedbilevel.algorithms.parts.wrappers import Wrapper
from fedbilevel.core.algorithm import Algorithm, Part, check_algorithm, refuse_unless_allowed
from fedbilevel.core.authored import described
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.facts import Allows, Asks, Findings, No
from fedbilevel.core.fed import Fed, LoopBody, Phase, Reply, Total
from fedbilevel.core.hyperparameters import field_values
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree


class First(NamedTuple):
    """Hold the arguments of `Fed.sum_first`, for an exchange that ends with the first replies."""

    replies: int
    max_staleness: int | None = None


@dataclass(frozen=True)
class Asked:
    """Describe an exchange to a layer, on the server or at a client.

    Args:
        method: the method inside.
        phase: the name of its phase.
        message: the message to clients.
        key: on the server, the random key of the exchange; at a client, the random key of the phase.
        fresh: on the server, the number of a fresh cohort, in which clients keep no state; None: the round's cohort.
        each: on the server, whether the total must contain the replies of all clients that were asked.
        first: on the server, after how many replies the exchange ends; None: it waits for all clients that it asked.
        unbiased: on the server, whether the method takes the unbiased mean of the total (`Total.mean`).
    """

    method: Algorithm
    phase: str
    message: PyTree
    key: Array
    fresh: Any = None
    each: bool = False
    first: First | None = None
    unbiased: bool = False


PLACES = "steps", "kept", "privacy", "rule", "coded", "late", "outer", "state"
Kept = Any
"""The state that a layer keeps, on the server or at a client."""
Ask = Callable[[Asked], Total]
"""A function that sends a message to the clients, and returns the sum of the replies (`Total`)."""
Inside = Callable[[Asked, Client], Reply]
"""A function that runs the phase of a message on a client, with the layers inside."""


class Around(Part):
    """Base class of objects that `layered` puts around a method.

    For a subclass `Kind`, `Kind(method, …)` is short for `layered(method, Kind(…))`.
    """

    place: ClassVar[str]
    """The field of `Layered` for objects of this class, one of PLACES."""

    hides_losses: ClassVar[bool] = False
    """Whether the clients' losses at the end of a run must not be compared with others, as they are to stay private."""

    tells: ClassVar[str] = ""
    """One sentence on what leaves a client because of the layer, in the form "the client sends …"; "": nothing more."""

    def __new__(cls, algorithm: Any = None, *more: Any, **fields: Any) -> Any:
        if algorithm is None and not more:
            return super().__new__(cls)
        allowed = "a single method, with all fields given by name"
        require(isinstance(algorithm, Algorithm) and not more, f"{cls.__name__}(…)", more or algorithm, allowed)
        return layered(algorithm, cls(**fields))

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        place = vars(cls).get("place", PLACES[0])
        require(place in PLACES, f"{cls.__name__}.place", place, ", ".join(PLACES))
        fits = isinstance(cls.tells, str) and cls.tells.isprintable() and (not cls.tells or bool(cls.tells.strip()))
        require(fits, f"{cls.__name__}.tells", cls.tells, "a sentence in one line, or an empty text")
        check_functions(cls)

    @property
    def label(self) -> str:
        """Return the name of the layer for messages to the user."""
        return type(self).__name__

    @property
    def cannot(self) -> str:
        """Return a phrase for errors: what a method cannot do if it does not allow the layer."""
        return f"cannot have {self.label}"

    def what_to_lower(self) -> str:
        """Return advice for a run that diverges: which number of this object to lower. "" means that there is none."""
        return ""

    @abstractmethod
    def layer(self, among: Mapping[str, Around]) -> Layer | None:
        """Return the layer for this object; None: the layer at another place also does the work of this object.

        `among` has the objects at all places, by place, so that the objects at two places can share one layer.
        """


class Layer(Around):
    """Base class of layers, which change what happens around every exchange of a method.

    A subclass overrides the functions whose behaviour it changes; the functions of this class change nothing. Other
    public names of a subclass are its fields, or functions that it declares abstract. The names of helpers must begin
    with an underscore.
    """

    kind: ClassVar[str]
    """The name of the layer, under which its state is stored."""

    needs: ClassVar[str] = ""
    """The entry of `Allows` that a method must support; "" for none."""

    excludes: ClassVar[Mapping[str, str]] = {}
    """Kinds of layers that cannot be combined with this one, each with the reason."""

    learns: ClassVar[bool] = False
    """Whether the layer must run a round, in which it learns its state, before an estimate of the hypergradient."""

    _vectors: ClassVar[bool] = False  # whether a metric may be a vector, from which the library computes numbers

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_names_and_attributes(cls, Layer, PLACES)

    def layer(self, among: Mapping[str, Around]) -> Layer:
        return self

    @property
    def whole(self) -> bool:
        """Return whether the layer needs replies with all entries of the model, as at the places "rule" and "coded".

        Such a layer cannot be combined with submodels, which are therefore refused.
        """
        return self.place in ("rule", "coded")

    def fits(self, method: Algorithm) -> None:
        """Raise ConfigurationError if the layer cannot be put around the method."""

    def asks(self, inside: Asks) -> Asks:
        """Return what rounds ask of an engine if they run with the layer; `inside` is what they ask without it."""
        return inside

    def allows(self, inside: Allows, method: Algorithm) -> Allows:
        """Return the features that the method supports with the layer; `inside` has its features without the layer."""
        return inside

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        """Raise ConfigurationError if the problem or the clients do not fit the layer."""

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> PyTree:
        """Return the layer's state on the server before round 0; None if the layer has no state on the server."""
        return None

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        """Return the layer's state at a client before round 0; None if the layer has no state at clients."""
        return None

    def before_round(self, method: Algorithm, kept: Kept) -> tuple[Algorithm, Kept]:
        """Return the method as the server runs it in a round, and the layer's new state on the server."""
        return method, kept

    def exchange(self, asked: Asked, kept: Kept, ask: Ask) -> tuple[Total, Kept]:
        """Make an exchange on the server. Return its `Total`, and the layer's new state.

        `ask` sends a message on toward the clients, and returns a `Total`, which the layer may replace. `kept` is the
        layer's state. The returned update has the shapes of the update that `ask` returns. But if the layer changes
        updates in `reply`, then the update that `exchange` returns has the shapes of the method's replies.
        """
        return ask(asked), kept

    def reply(self, asked: Asked, kept: Kept, client: Client, run: Inside) -> tuple[Reply, Kept]:
        """Make a reply at a client. Return the reply, and the layer's new state.

        The function `run` runs the phase with the layers inside this one, and returns a `Reply`, which the layer may
        replace. `kept` is the layer's state, or None in a fresh cohort, where clients have no states. After `Coded`
        parts are decoded, the returned update must have the shapes of the update that `run` returns. It may have other
        shapes if the layer also has an `exchange`, which must restore these shapes on the server. A layer with
        `place` = "kept" may put None in place of a part.
        """
        return run(asked, client), kept

    def after_round(self, method: Algorithm, problem: Problem, kept: Kept, before: Any, after: Any) -> tuple[Any, Kept]:
        """Return the method's state at the end of a round, and the layer's new state on the server.

        `before` and `after` are the states of the method at the beginning and at the end of the round.
        """
        return after, kept

    def findings(self, method: Algorithm, kept: Kept, found: Findings) -> Findings:
        """Return the findings of the method and the layer; `found` has the findings of the method."""
        return found

    def remarks(self, method: Algorithm, kept: Kept) -> tuple[str, ...]:
        """Return sentences for the user at the end of a run, from the layer's state on the server."""
        return ()


class Stack(NamedTuple):
    """Hold a method and its layers.

    The layers around an exchange come first, in the order from the phase to the network. The layers at the end of a
    round follow.
    """

    method: Algorithm
    layers: tuple[Layer, ...]

    def allows(self) -> Allows:
        """Return the optional features that the method supports within the layers."""
        allows = self.method.allows
        for layer in self.layers:
            allows = layer.allows(allows, self.method)
            if layer.whole:
                allows = allows._replace(submodels=No(f"{layer.label} needs whole replies"))
        return allows

    def refuse_misfits(self) -> None:
        """Refuse a layer that the method, or another layer, does not allow."""
        for layer in self.layers:
            others = {other.kind: other for other in self.layers if other is not layer}
            if layer.kind in others:
                two = f"{layer.label} and {others[layer.kind].label} are both of the kind {layer.kind!r}"
                raise ConfigurationError(f"{two}: each layer needs its own kind, under which its state is stored")
            for kind, why in layer.excludes.items():
                if kind in others:
                    raise ConfigurationError(f"{layer.label} and {others[kind].label} cannot be combined: {why}")
            if layer.needs:
                allows = self._replace(layers=tuple(others.values())).allows()
                refuse_unless_allowed(self.method, layer.needs, layer.cannot, allows)
            layer.fits(self.method)

    def slots(self, make: str, *given: Any) -> Slots:
        """Return the first states of layers at the server or at a client, by kind, without layers that have no state.

        `make` is the name of the function that makes a layer's state, and `given` has the arguments of this function.
        """
        made = {layer.kind: first_slot(layer, make, (self.method, *given)) for layer in self.layers}
        return {kind: slot for kind, slot in made.items() if slot is not None}

    def begun(self, slots: Slots) -> tuple[Algorithm, Slots]:
        """Return the method as a round runs it, and the new states of the layers."""
        method = self.method
        for layer in self.layers:
            method, slot = checked(layer, "before_round", (method, slots.get(layer.kind)), slots)
            slots = with_slot(slots, layer.kind, slot)
        return method, slots

    def ended(self, problem: Problem, slots: Slots, before: Any, after: Any) -> tuple[Any, Slots]:
        """Return the method's state at the end of a round, and the new states of the layers."""
        for layer in self.layers:
            given = self.method, problem, slots.get(layer.kind), before, after
            after, slot = checked(layer, "after_round", given, slots, after)
            slots = with_slot(slots, layer.kind, slot)
        return after, slots


class Layered(Wrapper):
    """Run a method with layers around its exchanges, at most one at each place, from the phase to the network.

    Args:
        algorithm: the method.
        steps: the layer that adapts the step sizes that are None.
        kept: the layer that keeps a part of the model at the client.
        privacy: the layer that clips replies and adds noise.
        rule: the layer that replaces the mean of all replies.
        coded: the layer that makes replies shorter.
        late: the layer that continues after the first replies.
        outer: the layer that replaces the method's own steps on x.
        state: the layer that changes the state at the end of a round.
    """

    steps: Layer | None = None
    kept: Layer | None = None
    privacy: Layer | None = None
    rule: Layer | None = None
    coded: Around | None = None
    late: Around | None = None
    outer: Layer | None = None
    state: Layer | None = None

    def validate(self) -> None:
        """Refuse a layer that the method, or another layer, does not allow."""
        check_algorithm(self.algorithm)
        require(not layers_at(self.algorithm), "Layered.algorithm", "in layers", "a method without any: use layered")
        for place, part in self.parts.items():
            fits = isinstance(part, Around) and part.place == place
            require(fits, f"Layered.{place}", type(part).__name__, "a layer of that place")
        self.stack.refuse_misfits()

    @property
    def parts(self) -> dict[str, Around]:
        """Return the objects at all occupied places, by place, in the order of the places."""
        return {name: part for name, part in field_values(self).items() if name in PLACES and part is not None}

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Return the layers in order: first those from the phase to the network, then those at the end of a round."""
        every = (part.layer(self.parts) for part in self.parts.values())
        return tuple(layer for layer in every if layer is not None)

    @property
    def stack(self) -> Stack:
        """Return the method with its layers in order."""
        return Stack(self.algorithm, self.layers)

    @property
    def asks(self) -> Asks:
        asks = self.algorithm.asks
        for layer in self.layers:
            asks = layer.asks(asks)
        return asks

    @property
    def allows(self) -> Allows:
        return self.stack.allows()

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        for layer in self.layers:
            whole = f"None with {layer.label}, which needs whole replies"
            require(not layer.whole or clients.capacity is None, "Clients.capacity", "given", whole)
            layer.check(self.algorithm, problem, clients, x, y)
        method, _ = self.stack.begun(self.stack.slots("server_slot", x, y))
        method.check(problem, clients, x, y)

    def init(self, x: PyTree, y: PyTree) -> Any:
        inside, slots = self.algorithm.init(x, y), self.stack.slots("server_slot", x, y)
        return LayeredState(inside, slots) if slots else inside

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        inside, slots = self.algorithm.client_state(problem, x, y), self.stack.slots("client_slot", problem, x, y)
        return LayeredClient(inside, slots) if slots else inside

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        before, stack = server_parts(state), self.stack
        method, slots = stack.begun(before.slots)
        asking = LayersFed(fed, stack, method, slots, before.inside)
        inside = method.round(asking, before.inside, key)
        inside, slots = stack.ended(fed.problem, asking.slots, before.inside, inside)
        return LayeredState(inside, slots) if isinstance(state, LayeredState) else inside

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Estimate the hypergradient at (x, y) as the method does, in the shape of x.

        If a layer has to learn its state first (`Layer.learns`), a round at (x, y) runs before the estimate.

        Raises:
            ConfigurationError: replies are late or coded, so that they also depend on replies at other points.
        """
        for part in filter(None, (self.coded, self.late)):
            allowed = "a method without this layer, whose replies also depend on replies at other points"
            require(False, f"{self.label}.hypergradient_at", f"with {type(part).__name__}", allowed)
        stack = self.stack
        slots = stack.slots("server_slot", x, y)
        if any(layer.learns for layer in self.layers):
            first, key = jax.random.split(key)
            slots = Layered.round(self, fed, Layered.init(self, x, y), first).slots
        method, slots = stack.begun(slots)
        return method.hypergradient_at(LayersFed(fed, stack, method, slots, At(x, y)), x, y, key)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        asked = Asked(self.algorithm, name, message, key)
        return around(self.layers, run_inside)(asked, client)

    def finished(self, state: Any) -> Any:
        return self.algorithm.finished(server_parts(state).inside)

    def findings(self, state: Any) -> Findings:
        inside, slots = server_parts(state)
        found = self.algorithm.findings(inside)
        for layer in self.layers:
            found = layer.findings(self.algorithm, slots.get(layer.kind), found)
            if not isinstance(found, Findings):
                returns = "it must return Findings, such as found._replace(columns=found.columns | {'name': number})"
                raise ConfigurationError(f"{layer.label}.findings returned {described(found)}: {returns}")
        return found

    def remarks(self, state: Any) -> tuple[str, ...]:
        inside, slots = server_parts(state)
        remarks = self.algorithm.remarks(inside)
        for layer in self.layers:
            own = layer.remarks(self.algorithm, slots.get(layer.kind))
            if not isinstance(own, tuple) or not all(isinstance(text, str) for text in own):
                raise ConfigurationError(f"{layer.label}.remarks returned {own!r}: it must return a tuple of texts")
            remarks += own
        return remarks


def cut(algorithm: Algorithm, place: str) -> tuple[Algorithm, Algorithm, tuple[Layer, ...]]:
    """Divide a method with layers at a place; return three parts.

    The parts are the method with the layers before the place, the method without layers, and the layers from the place
    on. A phase of the first part, run inside `around(layers, …)` with these layers, gives the same reply as the phase
    of the whole method.
    """
    if isinstance(algorithm, Wrapper) and not isinstance(algorithm, Layered):
        inside, method, outside = cut(algorithm.algorithm, place)
        return replace(algorithm, algorithm=inside), method, outside
    if not isinstance(algorithm, Layered):
        return algorithm, algorithm, ()
    after: dict[str, Any] = dict.fromkeys(PLACES[PLACES.index(place) :])
    inside = replace(algorithm, **after)
    return inside, algorithm.algorithm, algorithm.layers[len(inside.layers) :]


def overrides(layer: Layer, function: str) -> bool:
    """Return whether a layer's class overrides a function of `Layer`."""
    return getattr(type(layer), function) is not getattr(Layer, function)


def run_inside(asked: Asked, client: Client) -> Reply:
    """Run a phase of the method without its layers, and return the reply.

    The state of the reply contains the method's new state, and the states of the layers unchanged.
    """
    before = client_parts(client.state)
    reply = asked.method.run_phase(asked.phase, replace(client, state=before.inside), asked.message, asked.key)
    if not isinstance(client.state, LayeredClient):
        return reply
    inside = before.inside if reply.state is None else reply.state
    return reply._replace(state=before._replace(inside=inside))


def around(layers: Iterable[Layer], run: Inside) -> Inside:
    """Return the function `run` with layers around it; the first layer is the innermost."""

    def one(layer: Layer, run: Inside, asked: Asked, client: Client) -> Reply:
        slots, inside = client_parts(client.state).slots, Noted(run)
        given = asked, slots.get(layer.kind), client, inside
        reply, slot = checked(layer, "reply", given, slots, inside, overrides(layer, "exchange"))
        if slot is None:
            return reply
        return reply._replace(state=reply.state._replace(slots=with_slot(reply.state.slots, layer.kind, slot)))

    for layer in layers:
        run = partial(one, layer, run)
    return run


class LayersFed:
    """Pass the exchanges of a method through its layers. Loops also carry the layers' states on the server."""

    def __init__(self, fed: Fed, stack: Stack, method: Algorithm, slots: Slots, at: Any) -> None:
        self.fed, self.stack, self.method, self.slots, self.state = fed, stack, method, slots, at
        self.problem, self.repetition, self.sampled = fed.problem, fed.repetition, fed.sampled

    def asked(self, phase: Phase, message: PyTree, key: Array, **options: Any) -> Asked:
        return Asked(self.stack.method, self.method.phase_name(phase), message, key, **options)

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        return self.through(self.asked(phase, message, key, fresh=fresh, unbiased=unbiased)).mean(unbiased)

    def sum(self, phase: Phase, message: PyTree, key: Array, *, fresh: Any = None, each: bool = False) -> Total:
        return self.through(self.asked(phase, message, key, fresh=fresh, each=each))

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        return self.through(self.asked(phase, message, key, first=First(n, max_staleness))).update

    def through(self, asked: Asked) -> Total:
        """Make an exchange through all layers. The first layer gets the message first and the total last."""
        ask: Ask = self.ask
        for layer in reversed(self.stack.layers):
            ask = partial(self.one, layer, ask)
        return ask(asked)

    def one(self, layer: Layer, ask: Ask, asked: Asked) -> Total:
        inside = Noted(ask)
        given = asked, self.slots.get(layer.kind), inside
        total, slot = checked(layer, "exchange", given, self.slots, inside, overrides(layer, "reply"))
        if overrides(layer, "exchange") and overrides(layer, "reply"):
            self.check_declared(layer, asked, total.update)
        self.slots = with_slot(self.slots, layer.kind, slot)
        return total

    def check_declared(self, layer: Layer, asked: Asked, update: PyTree) -> None:
        """Refuse an update that differs from the phase's declaration after a layer changed it on both sides."""
        said = getattr(self.stack.method.phases[asked.phase], "__takes_and_gives__", None)
        inner = self.stack.layers[: self.stack.layers.index(layer)]
        if said is not None and not any(overrides(one, "reply") for one in inner):
            check_declared(f"{layer.label}.exchange", asked.phase, said[1], update, self.state)

    def ask(self, asked: Asked) -> Total:
        phase = self.stack.method.phases[asked.phase]
        if asked.first is not None and asked.each:
            ends = "every reply was asked for in an exchange that ends with the first replies"
            raise ConfigurationError(ends, where=self.stack.method.label)
        if asked.first is None:
            return self.fed.sum(phase, asked.message, asked.key, fresh=asked.fresh, each=asked.each)
        n, most = asked.first
        return Total.of_mean(self.fed.sum_first(n, phase, asked.message, asked.key, max_staleness=most))

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        """Repeat exchanges in a loop that also carries the states of the layers."""

        def threaded(fed: Fed, both: tuple[Any, Any], key: Array) -> tuple[Any, Any]:
            inside: Any = copy.copy(self)
            inside.fed, inside.slots, inside.problem, inside.repetition = fed, both[1], fed.problem, fed.repetition
            return body(inside, both[0], key), inside.slots

        done = None if until is None else (lambda both: until(both[0]))
        carry, self.slots = self.fed.repeat(n, threaded, (carry, self.slots), key, until=done)
        return carry


def layered(algorithm: Algorithm, *layers: Around | None) -> Algorithm:
    """Return the method with these layers around its exchanges, each at its place; without layers, the method itself.

    Args:
        algorithm: the method, which may have other layers already.
        layers: the layers, such as `fb.Asynchronous(wait_for=3)`, `fb.parts.TopK()` or a layer of your own. A None
            among them is ignored.

    Raises:
        ConfigurationError: the method, or another layer, does not allow a layer; or two layers have the same place.
    """
    require(isinstance(algorithm, Algorithm), "layered: the method", algorithm, "a method, such as fb.SimFBO()")
    for layer in layers:
        allowed = "an instance of a subclass of authoring.Layer, such as fb.parts.TopK()"
        require(layer is None or isinstance(layer, Around), "layered: a layer", layer, allowed)
    if isinstance(algorithm, Wrapper) and not isinstance(algorithm, Layered):
        return replace(algorithm, algorithm=layered(algorithm.algorithm, *layers))
    has = [*layers_at(algorithm), *filter(None, layers)]
    chosen: dict[str, Any] = {layer.place: layer for layer in has}
    if len(chosen) < len(has):
        place = next(layer.place for layer in has if chosen[layer.place] is not layer)
        names = " and ".join(type(layer).__name__ for layer in has if layer.place == place)
        do = "leave one out, or give your own layer another `place`"
        raise ConfigurationError(f"two layers of one place around {algorithm.label}, {place!r}: {names}; {do}")
    if isinstance(algorithm, Layered):
        return replace(algorithm, **chosen)
    return Layered(algorithm, **chosen) if chosen else algorithm


def layers_at(algorithm: Algorithm) -> list[Around]:
    """Return the objects at all places of a method with layers, which may be within other wrappers."""
    if isinstance(algorithm, Layered):
        return list(algorithm.parts.values())
    return layers_at(algorithm.algorithm) if isinstance(algorithm, Wrapper) else []
