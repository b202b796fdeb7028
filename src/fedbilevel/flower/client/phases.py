"""Run phases at a site, on its samples, within its limits and under its terms of privacy.

Under privacy, an update is clipped and gets noise at a fixed place among the layers of the method. The layers outside
of this place send differences or compress replies, for example. These layers get only updates that already have noise,
and nothing else of the client, so their results cost no additional ε.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms.parts.layers import Asked, Layer, around, cut
from fedbilevel.algorithms.parts.slots import only_slots
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client, Samples
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.fed import Reply
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.own import Given, OwnNumbers, check_own
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.flower import wire
from fedbilevel.flower.client.limits import Limits, TimeLimit
from fedbilevel.flower.privacy import PrivacyGuard
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import RequestMessage

T = TypeVar("T")
log = logging.getLogger("fedbilevel.client")


class SitePhases:
    """A client's method, samples and limits, ready to run phases.

    Args:
        id: the client's id.
        algorithm: the method with the layers around it.
        problem: the problem with the client's losses.
        samples: the client's samples of the outer and of the inner loss.
        own: the client's own values of the method's fields, such as local steps. They replace the values that the
            server sends.
        limits: the limits on a server's requests.
        guard: the guard that clips the client's replies and adds noise; None: there is no privacy.
    """

    def __init__(
        self,
        id: int,
        algorithm: Algorithm,
        problem: Problem,
        samples: tuple[Samples, Samples],
        own: OwnNumbers,
        limits: Limits,
        guard: PrivacyGuard | None,
    ) -> None:
        self.id, self.algorithm, self.problem, self.own = id, algorithm, problem, own
        (self.outer, self.inner), self.limits, self.guard = samples, limits, guard
        self.time_limit = TimeLimit(limits.max_seconds)

    def within_limit(self, task: Callable[[], T]) -> T:
        """Run a task within the time limit of a phase, and return its result."""
        return self.time_limit.run(in_precision_of_here(task))

    def reply(self, request: RequestMessage, message: PyTree, state: PyTree) -> tuple[Reply, float]:
        """Return the reply to a request as it leaves this client, and ε so far, which is 0 without privacy.

        Raises:
            Refusal: the request is outside of the site's limits, or the reply is not finite. Under privacy, the text
                does not depend on the data.
        """
        client = self.client(request, state)
        if self.guard is not None:
            return self.reply_under_privacy(self.guard, request, message, client)
        asked = Asked(self.algorithm, request.phase, message, self.key(request))
        reply = self.within_limit(lambda: self.run(request.round, asked, client))
        return finite(reply), 0.0

    def reply_under_privacy(
        self, guard: PrivacyGuard, request: RequestMessage, message: PyTree, client: Client
    ) -> tuple[Reply, float]:
        """Return a reply whose update was clipped and got noise, and ε so far, including this reply."""
        guard.check_account(request.epsilon, request.delta)
        inside, method, outside = cut(self.algorithm, "privacy")
        context: list[int | str] = [request.run, request.round, request.exchange, request.phase]
        epsilon, released, given_up = 0.0, False, False

        def protected(asked: Asked, _: Client) -> Reply:
            nonlocal epsilon, released
            if asked.method is not method:
                raise ConfigurationError("a layer outside of privacy must call the phase with the method that it got")
            reply = finite(self.run(request.round, replace(asked, method=inside), client))
            if given_up:
                raise Refusal(Code.LIMIT, "the phase was given up")
            released = True
            update, epsilon = guard.protect(reply.update, context)
            return Reply(jax.tree.map(jnp.asarray, update), reply.state)

        def task() -> Reply:
            layers = tuple(at(layer, request.round) for layer in outside)
            asked = Asked(method, request.phase, jax.tree.map(as_array, message), self.key(request))
            sent = around(layers, protected)(asked, self.seen_outside(client, layers))
            return finite(Reply(sent.update, sent.state))  # metrics and counts of work depend on the data

        try:
            return jax.block_until_ready(self.within_limit(task)), epsilon
        except Exception:
            given_up = True
            if released:
                raise
            log.exception("phase %s of round %d failed", request.phase, request.round)
            text = "the phase failed; the client's log says more"
            raise Refusal(Code.HIDDEN, f"{text}. One possible cause: {guard.privacy.what_to_lower()}") from None

    def seen_outside(self, client: Client, layers: tuple[Layer, ...]) -> Client:
        """Return the client as layers outside of privacy see it: its id, its weight and the states of these layers."""
        none: Any = None
        state = only_slots(client.state, (layer.kind for layer in layers))
        return Client(none, outer=none, inner=none, id=client.id, weight=client.weight, state=state)

    def run(self, round: int, asked: Asked, client: Client) -> Reply:
        """Run a phase by its compiled program. Data, state and hyperparameters are arguments of the program."""
        number = jnp.asarray(round, jnp.int32)
        run = program(self.problem)
        reply: Reply = run(asked.phase, asked.method, number, client, asked.message, asked.key)
        return jax.block_until_ready(reply)

    def key(self, request: RequestMessage) -> Array:
        """Return the client's random key for the exchange of a request."""
        key = jax.random.wrap_key_data(jnp.asarray(np.frombuffer(request.key, np.uint32)), impl=request.key_kind)
        return jax.random.fold_in(key, self.id)

    def client(self, request: RequestMessage, state: PyTree) -> Client:
        """Return the `Client` object that a phase gets: samples, state and own numbers."""
        without: Any = None  # the compiled program adds the problem
        return Client(
            problem=without,
            outer=self.outer,
            inner=self.inner,
            id=jnp.asarray(self.id, jnp.int32),
            weight=jnp.asarray(request.weight, float),
            state=state,
            own=self.own_numbers(request),
        )

    def own_numbers(self, request: RequestMessage) -> dict[str, Any]:
        """Return the client's own numbers in this round.

        Numbers that the site sets replace the numbers that the server sends.

        Raises:
            Refusal: the numbers that the server sends do not fit the method, or a count is above the site's limit.
        """
        sent = wire.numbers_in("own numbers", request.own)
        try:
            check_own(self.algorithm, {name: Given(np.asarray(number)) for name, number in sent.items()})
        except ConfigurationError as error:
            raise Refusal(Code.CONTRACT, f"the client's own numbers: {error}") from None
        numbers = {**sent, **self.own}
        self.limits.check_own(numbers)
        return {name: jnp.asarray(n, jnp.int32 if isinstance(n, int) else float) for name, n in numbers.items()}


def finite(reply: Reply) -> Reply:
    """Return the reply, and raise a Refusal if it is not finite."""
    if bad := nonfinite_leaves((reply.update, reply.metrics)):
        raise Refusal(Code.NUMBERS, f"the reply is not finite in {', '.join(bad)}")
    return reply


def as_array(leaf: Any) -> Any:
    """Convert a NumPy array to a JAX array, and return anything else, such as a Python number, unchanged."""
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def in_precision_of_here(task: Callable[[], T]) -> Callable[[], T]:
    """Wrap a task so that another thread computes in the precision of this thread.

    JAX sets the precision (float32 or float64) for each thread.
    """
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

    def run() -> T:
        with jax.enable_x64(x64):
            return task()

    return run


PROGRAMS: WeakKeyDictionary[Problem, Any] = WeakKeyDictionary()


def program(problem: Problem) -> Any:
    """Return the function that runs the phases of a problem.

    It is compiled once for all clients of this process that share the problem.

    The function has only a weak reference to the problem, so that both are freed together. With an ordinary reference
    they would never be freed: JAX keeps a compiled program, and those of its arguments that are not arrays, as long as
    the function lives.
    """
    known: Any = ref(problem)

    def run(phase: str, algorithm: Algorithm, round: Any, client: Client, message: PyTree, key: Any) -> Reply:
        client = replace(client, problem=known().over_batches())  # an epoch's last batch is padded
        return at(algorithm, round).run_phase(phase, client, message, key)

    if problem not in PROGRAMS:
        PROGRAMS[problem] = jax.jit(run, static_argnums=0)
    return PROGRAMS[problem]
