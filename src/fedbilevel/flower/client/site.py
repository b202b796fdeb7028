"""Run a client: its problem, samples and state, its responses to requests, and the ClientApp that sends them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedbilevel.algorithms.parts.adaptive_steps import adaptive
from fedbilevel.algorithms.parts.composed import composed
from fedbilevel.core.algorithm import Algorithm, check_algorithm, check_solves
from fedbilevel.core.client import Clients, RemoteClients, Samples
from fedbilevel.core.errors import CheckpointError, require
from fedbilevel.core.fed import decoded
from fedbilevel.core.own import Given, OwnNumbers, check_own
from fedbilevel.core.privacy import Privacy, check_noise, norm_of, vector_of
from fedbilevel.core.problem import Problem, SimpleBilevel
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.tree import PyTree, nonfinite_leaves, split
from fedbilevel.engines import first_look
from fedbilevel.engines.evaluation import Measure, PerClient, PerClientEvaluation, as_per_client, check_per_client
from fedbilevel.engines.fingerprint import of_samples
from fedbilevel.engines.machine import keep_on_disk_if_possible
from fedbilevel.engines.process_group import current_group
from fedbilevel.engines.submodels import SubmodelPlan
from fedbilevel.flower import wire
from fedbilevel.flower.client.app_hash import hash_of_app
from fedbilevel.flower.client.approval import ALL, check_approve
from fedbilevel.flower.client.approval_rule import Proposal, check_own_numbers
from fedbilevel.flower.client.limits import Limits, TimeLimit, described_layers
from fedbilevel.flower.client.phases import SitePhases, in_precision_of_here
from fedbilevel.flower.client.refusals import RefusalLog
from fedbilevel.flower.client.store import REFUSED, Agreed, ContextStore, FolderStore, Store, Versions
from fedbilevel.flower.privacy import PrivacyGuard
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import CallSignature, Contract, RequestMessage, ResponseMessage
from fedbilevel.wording import printable

T = TypeVar("T")
log = logging.getLogger("fedbilevel.client")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A client's settings: its samples, algorithm, limits and privacy.

    Args:
        id: the number of the client in the population, 0 ≤ id < M.
        name: the name of the site, for its log; "": the log has only the number.
        contents: a description of the samples, for the log; "": the log has their numbers and their layout.
        algorithm, problem, x0, y0: as for `solve` on the server. Only the shapes of x0 and y0 are compared with the
            server's. Their values must also be equal if clients' states begin with them: in ADBO and SDBO, where
            clients have their own x and y, and in problems that are local in x, where clients keep blocks of x.
        outer: the client's samples of the outer loss: a pytree with leaves of shape (samples, ...).
        inner: the client's samples of the inner loss, in the same form; None: both losses use the same samples.
        own: the client's own numbers: values for "local_steps" or for fields of the method, by the field's path. They
            take precedence over the numbers that the server sends (`RemoteClients.own`).
        capacity: the share of the model's units that the client can hold, as on the server (`RemoteClients.capacity`).
            The client then accepts only messages of this size. None: the whole model.
        limits: the limits on a server's requests.
        privacy: the terms by which replies are clipped and get noise; None: they are not clipped, and get none.
        metrics_per_client: the metrics that may be measured on the client's samples, as for `solve` on the server.
        tells_metrics: whether the server gets the values of these metrics if it asks. The values are exact, and the
            server chooses x and y. Not allowed with `privacy`, which does not protect these values.
        folder: the state folder, for everything that is kept when a process ends: a hash of the samples; the client's
            state in a run, if the algorithm has one; and with `privacy` the secret from which noise is drawn, and the
            account of all replies. With `privacy`, no other client may use the folder. None: Flower keeps the state
            until the SuperNode restarts; then the client starts anew.
        answer: a function (question) -> answer, both texts, for questions that a server asks before a run begins. The
            server gets exact answers. Not allowed with `privacy`.
        source: a hash of the data from which the samples are made. If it changes after the client's first answer in a
            run, the client refuses the rest of the run. Empty: this is not checked.
        same_data: whether the client refuses to take part if the hash in `folder` shows that its samples have changed;
            False: it takes part, and its log has a warning.
        subject: the text that a person at the site approves, such as a spec. Empty: the text of the contract.
        approve: which runs the client takes part in. "all": every run. "ask": runs whose `subject` a person has
            approved in the state folder (see docs/how-to/approvals.md). The path of a .toml file with a rule: these
            runs, and runs that fit the rule.
    """

    id: int
    name: str = ""
    contents: str = ""
    algorithm: Algorithm
    problem: Problem
    x0: PyTree
    y0: PyTree = None
    outer: PyTree
    inner: PyTree = None
    own: OwnNumbers = field(default_factory=dict)
    capacity: float | None = None
    limits: Limits = field(default_factory=Limits)
    privacy: Privacy | None = None
    metrics_per_client: Mapping[str, Measure | PerClient] = field(default_factory=dict)
    tells_metrics: bool = False
    folder: Path | None = None
    answer: Callable[[str], str] | None = None
    source: str = ""
    same_data: bool = False
    subject: str = ""
    approve: str = "all"

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        check_solves(self.algorithm, self.problem)
        object.__setattr__(self, "algorithm", composed(adaptive(self.algorithm, self.problem), self.problem))
        require(isinstance(self.own, Mapping), "Site.own", self.own, "numbers by name")
        path_of = "Site.own[{!r}]".format
        for name, number in self.own.items():
            require(type(number) in (int, float), path_of(name), number, "a plain number")
        own = {name: Given(np.asarray(number)) for name, number in self.own.items()}
        check_own(self.algorithm, own, path_of=path_of)
        check_approve("Site.approve", self.approve)
        require(self.id >= 0, "Site.id", self.id, "0 or more")
        share = self.capacity is None or 0 < self.capacity <= 1
        require(share, "Site.capacity", self.capacity, "None, or above 0 and at most 1")
        if self.privacy is not None:
            check_noise("Site.privacy", self.algorithm)
        hidden = self.privacy is None or not self.tells_metrics
        require(hidden, "Site.tells_metrics", True, "False with privacy: metrics would leave the site without noise")
        require(self.privacy is None or self.answer is None, "Site.answer", "given", "None with privacy: it is exact")
        require(self.folder is None or isinstance(self.folder, Path), "Site.folder", self.folder, "a pathlib.Path")
        known = not self.same_data or self.folder is not None
        require(known, "Site.folder", self.folder, "a folder (state-folder) with same_data: it has the earlier hashes")
        kept = self.privacy is None or self.folder is not None
        require(kept, "Site.folder", self.folder, "a folder (state-folder) with privacy: it has the account")
        for name, text in (("name", self.name), ("contents", self.contents)):
            require(isinstance(text, str), f"Site.{name}", text, "a text")

    @property
    def title(self) -> str:
        """Return how the log calls the client: "chur (client 2)", or "client 2" without a name."""
        return f"{self.name} (client {self.id})" if self.name else f"client {self.id}"


class RequestReader(NamedTuple):
    """A reader of requests, which refuses requests that do not fit the contract or exceed the site's limits."""

    contract: Contract
    limits: Limits

    def call(self, request: RequestMessage) -> CallSignature:
        """Return the call of the contract that a request makes. Refuse a request that makes no such call."""
        self.check_contract(request)
        phases = sorted({call.phase for call in self.contract.calls.values()})
        if request.phase not in phases:
            raise Refusal(Code.CONTRACT, f"unknown phase {request.phase[:80]!r}; this run has {', '.join(phases)}")
        call = self.contract.calls.get(request.call)
        if call is None or call.phase != request.phase:
            raise Refusal(Code.CONTRACT, f"phase {request.phase} has no message of this form in the contract")
        return call

    def check_contract(self, request: RequestMessage) -> None:
        """Refuse a request of another contract."""
        if request.contract != self.contract.digest:
            text = "the message belongs to another contract: algorithm, hyperparameters, shapes or version differ"
            raise Refusal(Code.CONTRACT, text)

    def message(self, call: CallSignature, request: RequestMessage) -> PyTree:
        """Return the message of a request, with Python numbers where the algorithm sends Python numbers."""
        message = self.arrays(request, call.message)
        if not 0 < request.weight <= 1 or not 0 <= request.round < 2**31 or request.exchange < 0:
            text = f"weight {request.weight}, round {request.round} or exchange {request.exchange} is out of range"
            raise Refusal(Code.MALFORMED, text)
        number = lambda leaf, like: leaf.item() if like.weak_type and not leaf.ndim else leaf  # noqa: E731
        return jax.tree.map(number, message, call.message)

    def arrays(self, request: RequestMessage, like: PyTree) -> PyTree:
        """Return the arrays of a request. Refuse too many bytes, and numbers that are not finite."""
        self.limits.check_bytes(len(request.payload))
        found = wire.from_bytes(request.payload, like)
        if bad := nonfinite_leaves(found):
            raise Refusal(Code.NUMBERS, f"the message is not finite in {', '.join(bad)}")
        return found


class ClientRuntime:
    """A site at work: it responds to requests, and keeps the samples and the compiled phases.

    Args:
        site: the client.
        serving: whether the client takes part from now on, so that its folder stores the hash of its samples.
        app: the hash of the app, for the audit.
        refusals: the log of refusals; None: a new one for this client.
        store: the store in the folder that the node configuration names. It is used if `Site.folder` is None, as in a
            study after the agreement. The samples then have another form, and their hash is not compared.
    """

    def __init__(
        self,
        site: Site,
        serving: bool = True,
        app: str = "",
        refusals: RefusalLog | None = None,
        store: FolderStore | None = None,
    ) -> None:
        self.site, self.app, self.refusals = site, app, refusals or RefusalLog()
        (self.x, x_fixed), (self.y, y_fixed) = split(site.x0), split(site.y0)
        self.problem = site.problem.with_fixed(x_fixed, y_fixed)
        outer = Ragged.listed("outer", [site.outer])
        inner = outer if site.inner is None else Ragged.listed("inner", [site.inner])
        self.examples = examples = outer.example(), inner.example()
        alone, prepared = Clients(outer, None if inner is outer else inner), self.problem.prepared()
        first_look.first_look(prepared, alone, self.x, self.y, prepared.traced(self.x, self.y, examples))
        self.measured: PerClientEvaluation | None = None
        if site.tells_metrics:
            metrics, none = as_per_client(site.metrics_per_client), isinstance(site.problem, SimpleBilevel)
            self.at = (self.x, self.x if none else self.y)  # y of a simple bilevel problem is an average of x
            check_per_client(metrics, site.x0, site.x0 if none else site.y0, examples)
            self.measured = PerClientEvaluation(metrics, alone, (x_fixed, x_fixed if none else y_fixed))
        floor = site.limits.min_batch_size
        self.outer = _samples(outer, floor)
        self.inner = self.outer if inner is outer else _samples(inner, floor)
        self.store = store if site.folder is None else FolderStore(site.folder, site.id)
        self.changed = ""
        if self.store is not None and site.folder is not None:
            hashes, of = of_samples(alone, current_group()), site.subject if site.source else ""
            self.changed = self.store.other_samples(hashes, serving, site.same_data, of)
        if self.changed and serving:
            log.warning("%s: %s", site.title, self.changed)
        self.guard = None
        if site.privacy is not None and site.folder is not None:
            self.guard = PrivacyGuard(site.privacy, site.folder, site.id)
        samples = self.outer, self.inner
        self.phases = SitePhases(site.id, site.algorithm, self.problem, samples, site.own, site.limits, self.guard)
        self.has_contract = False  # a method above the limits is not traced: each message is refused
        with suppress(Refusal):
            self.check_limits()
            self.has_contract = bool(self.contract.text)
        log.info("%s: %s", site.title, "; ".join(f"{name} {said}" for name, said in self.described().items()))

    def check_approval(self, request: RequestMessage, store: Store) -> str:
        """Return who has approved the subject; "" if no approval is needed. Else refuse, and reveal nothing more."""
        if self.site.approve == ALL:
            return ""
        if not self.site.subject:
            self.check_limits()  # a method above the limits has no contract
        try:
            by = store.require_approval(Proposal(self.subject, self.app, self.guard is not None), self.site.approve)
            check_own_numbers(self.subject, request.own, self.site.own)
            return by
        except Refusal:
            self.count(request.run, request.round if request.phase else -1, store)
            raise

    def check_limits(self) -> None:
        """Refuse to take part if the method, a layer or the number of samples is not within limits and floors."""
        limits, sizes = self.site.limits, (self.outer.longest, self.inner.longest)
        limits.check_algorithm(self.site.algorithm)
        limits.check_epochs(self.site.algorithm, max(sizes))
        limits.check_samples(min(sizes))
        if self.changed and self.site.same_data:
            raise Refusal(Code.SETTINGS, "this client's samples have changed")

    def described(self) -> dict[str, str]:
        """Describe samples, folder, privacy, floors and layers for the site's owner, as name -> text.

        This description is never sent.
        """
        limits, terms = self.site.limits, self.site.privacy
        hidden = "off: replies are not clipped, and get no noise"
        if terms is not None and self.guard is not None:
            account = self.guard.read()
            budget = "no budget" if terms.budget is None else f"budget ε = {terms.budget:g}"
            each = f"ε = {terms.epsilon_after(1):.3g} for a reply, {account.epsilon(terms.delta):.4g} so far"
            hidden = f"clip {terms.clip:g}, noise {terms.noise_multiplier:g}; {each}, at δ = {terms.delta:g}, {budget}"
        layout = ", ".join(wire.layout(self.examples[0]))
        samples = f"{self.outer.longest} outer, {self.inner.longest} inner, of {layout}"
        return {
            "samples": self.site.contents or samples,
            **({"changed": self.changed} if self.changed else {}),
            "folder": str(self.store.folder) if self.store else "none: a restart of the SuperNode loses its state",
            "privacy": hidden,
            "floors": f"{limits.min_local_samples} samples, batches of {limits.min_batch_size}",
            **described_layers(self.site.algorithm),
            "approval": self.approval(),
        }

    def approval(self) -> str:
        """Say in words what a person has to approve, or who has approved it."""
        name = wire.digest(self.subject) if self.subject else ""
        if self.site.approve == ALL:
            return f"not needed (approve = 'all'); the hash of this run is {name or 'not known yet'}"
        if self.store is None or not name:
            return "needed for each run"
        proposal = Proposal(self.subject, self.app or None, self.guard is not None)
        return self.store.approvals.described(proposal, self.site.approve)

    @property
    def subject(self) -> str:
        """Return the text that a person approves: `Site.subject`, else the contract's text, else ""."""
        return self.site.subject or (self.general.text if self.has_contract else "")

    @cached_property
    def general(self) -> Contract:
        """Return the contract of a client with the whole model: the algorithm, and every request it can make."""
        return wire.draw_up(self.site.algorithm, self.problem, self.x, self.y, self.examples)

    @cached_property
    def contract(self) -> Contract:
        """Return the contract for this client's capacity."""
        capacity = None if self.site.capacity is None else [self.site.capacity]
        alone = RemoteClients(1, *self.examples, capacity=capacity)
        submodel_plan = SubmodelPlan.of(self.site.algorithm, self.problem, alone, self.x, self.y)
        if submodel_plan is None:
            return self.general
        return self.general.cut(submodel_plan.unit_layout, submodel_plan.kept[0])

    @property
    def reader(self) -> RequestReader:
        """Return the reader of requests under this client's contract."""
        return RequestReader(self.contract, self.site.limits)

    def respond(self, request: RequestMessage, memory: Store) -> ResponseMessage:
        """Return the response to a request. An error is logged and sent as a refusal; it is not raised.

        Args:
            request: the request.
            memory: the store that is used if the site has no folder.
        """
        began, norm = time.perf_counter(), None
        asked = f"phase {request.phase[:40]!r}" if request.phase else "greeting"
        what = f"run {request.run[:8]!r} round {request.round} exchange {request.exchange} {asked}"
        blank = ResponseMessage(run=request.run, round=request.round, exchange=request.exchange, client=self.site.id)
        store = self.store or memory
        try:
            if not wire.is_run(request.run):
                raise Refusal(Code.MALFORMED, f"{request.run[:80]!r} is not the name of a run")
            by = self.check_approval(request, store)
            self.check_limits()
            check_source(self.site, request.run, store)
            if not request.phase:  # a greeting
                self.count(request.run, -1, store)
                if request.contract != (mine := self.general.text):
                    raise wire.disagreement(server=request.contract, site=mine)
                response = replace(blank, contract=self.contract.text)
            elif request.phase == wire.METRICS:
                response = self.tell(request, store, blank)
            elif request.phase in (wire.QUESTION, wire.AGREEMENT):
                response = self.answered(request, store, blank)
            else:
                response, norm = self.reply(request, store, blank)
            audit(store, response, request, self.app, self.subject, norm=norm, by=by)
            spent = f", ε = {response.epsilon:.4g} so far" if response.epsilon else ""
            log.info("%s: sent %d bytes in %.3f s%s", what, len(response.payload), time.perf_counter() - began, spent)
            self.refusals.replied(self.site.id)
        except Exception as error:  # noqa: BLE001  logged and sent
            response = blank.refusing(self.refusals.refusal(self.site.id, error, what))
            with logged_if_not_written(response, self.refusals, what):
                audit(store, response, request, self.app, self.subject)
        return response

    def tell(self, request: RequestMessage, store: Store, blank: ResponseMessage) -> ResponseMessage:
        """Return the response to a request for metrics on this client's samples, at the message's x and y."""
        if self.measured is None:
            raise Refusal(Code.SILENT, "this client does not share its metrics")
        reader = self.reader
        reader.check_contract(request)
        x, y = reader.arrays(request, wire.shapes(self.at))
        self.count(request.run, request.round, store)
        measured = self.measured
        numbers = self.phases.within_limit(
            lambda: {name: float(value) for name, (value,) in measured.each(x, y).items()}
        )
        return replace(blank, metrics=json.dumps(numbers))

    def answered(self, request: RequestMessage, store: Store, blank: ResponseMessage) -> ResponseMessage:
        """Answer a question, or store an agreement for the rest of the run. Log the whole answer.

        The first question or agreement of a run also stores `Site.source`.
        """
        answer = self.site.answer
        if answer is None:
            raise Refusal(Code.CONTRACT, "the server sent a study's question or agreement, but `Site.answer` is None")
        self.reader.check_contract(request)
        self.site.limits.check_bytes(len(request.payload))
        text = request.payload.decode()
        self.count(request.run, request.round, store)
        agreed = Agreed(text, self.site.source)
        if request.phase == wire.AGREEMENT:
            store.keep_agreement(request.run, agreed)
            return blank
        if self.site.source and not store.agreement(request.run).source:
            store.keep_agreement(request.run, agreed._replace(text=""))
        said = self.phases.within_limit(lambda: answer(text))
        log.info("%s answers: %s", self.site.title, said)
        return replace(blank, payload=said.encode())

    def reply(
        self, request: RequestMessage, store: Store, blank: ResponseMessage
    ) -> tuple[ResponseMessage, float | None]:
        """Check a request for a phase, run the phase and save the client's state.

        Returns:
            The response, and the norm of the update for the audit; None without an audit.
        """
        reader = self.reader
        message = reader.message(reader.call(request), request)
        self.count(request.run, request.round, store)
        kept, differences = Versions(), self.contract.algorithm.asks.differences
        if not request.fresh and self.contract.state is not None:  # `kept`: up to the last reply that counted
            counted = request.counted_round, request.counted_exchange
            kept = store.load(request.run, self.contract.state).up_to(counted, request.round, differences)
        before = kept.states[-1] if kept.states else None if request.fresh else self.first
        reply, epsilon = self.phases.reply(request, message, before)
        response = replace(
            blank,
            layout=wire.layout(reply.update),
            payload=wire.to_bytes(reply.update),
            metrics=json.dumps({name: float(value) for name, value in (reply.metrics or {}).items()}),
            gradients=int(reply.gradients),
            hvps=int(reply.hvps),
            epsilon=epsilon,
            delta=0.0 if self.guard is None else self.guard.privacy.delta,
        )
        state = before if differences and reply.state is None else reply.state  # then `up_to` finds one for every reply
        if state is not None and not request.fresh:  # at the end, so that a refused request changes no state
            now = jax.tree.map(np.asarray, state)
            store.save(request.run, kept.then((request.round, request.exchange), now))
        return response, None if store.audit is None else float(norm_of(vector_of(decoded(reply.update))))

    def count(self, run: str, round: int, store: Store) -> None:
        """Count a request, and store the count on the disk before anything is computed.

        Raises:
            Refusal: the request is above a limit.
        """
        contract = self.contract.digest if self.has_contract else ""
        with store.counting():
            request_counts = store.request_counts().next(run, contract, round)
            self.site.limits.check_request_counts(request_counts)
            store.save_request_counts(request_counts)

    @cached_property
    def first(self) -> PyTree:
        """Return the client's state before its first reply."""
        return jax.tree.map(np.asarray, self.site.algorithm.client_state(self.problem, self.x, self.y))


def check_source(site: Site, run: str, store: Store) -> None:
    """Refuse the rest of a run if a site's data have changed since its first answer in this run."""
    if site.source and store.agreement(run).source not in ("", site.source):
        raise Refusal(Code.SETTINGS, "this client's data have changed since the run began; submit the run again")


def audit(
    store: Store, response: ResponseMessage, request: RequestMessage, app: str, subject: str, **more: Any
) -> None:
    """Write a line about a response to the audit, before the response leaves the site.

    Texts from the server are shortened.

    Args:
        store: the store with the audit.
        response: the response.
        request: the request.
        app: the hash of the app.
        subject: the text that a person approves (`ClientRuntime.subject`).
        more: the norm of the update that is sent, after decoding (or None); and who has approved the subject (or "").

    Raises:
        Refusal: the audit cannot be written.
    """
    what: dict[str, Any] = {"run": printable(request.run, 64), "app": app, "subject": subject and wire.digest(subject)}
    what |= {"contract": printable(request.contract, 32) if request.phase else wire.digest(request.contract)}
    what |= {"round": request.round, "exchange": request.exchange}
    what |= {"phase": printable(request.phase, 80) or "greeting"}
    if response.refused:
        what |= {"code": response.code, "why": response.refused}
    else:
        what |= {"bytes": len(response.metrics if request.phase == wire.METRICS else response.payload)}
    what |= {name: one for name, one in more.items() if one not in (None, "")}
    if response.epsilon:
        what |= {"epsilon": response.epsilon, "delta": response.delta}
    try:
        store.note(REFUSED if response.refused else "sent", **what)
    except CheckpointError as error:
        text = "this client's audit cannot be written, and nothing is sent without a line in the audit"
        raise Refusal(Code.AUDIT, text) from error


@contextmanager
def logged_if_not_written(response: ResponseMessage, refusals: RefusalLog, what: str) -> Iterator[None]:
    """Log an error if the `with` block cannot write a refusal to the audit. The refusal is sent nevertheless."""
    try:
        yield
    except (Refusal, CheckpointError) as error:
        if Code.of(response.code) not in (Code.AUDIT, Code.DISK):  # the log already has an error of this folder
            refusals.refusal(response.client, error, what)


def _samples(rows: Ragged, floor: int = 1) -> Samples:
    """Return a client's samples as arrays on its device. Mini-batches of fewer than `floor` samples are refused."""
    size, values = int(rows.size[0]), jax.tree.map(jnp.asarray, rows.values)
    return Samples(values, jnp.asarray(0), jnp.asarray(size), size, equal=True, floor=floor)


def store_of(context: Context) -> Store:
    """Return the store that counts requests before a site exists: the state folder, else Flower's memory."""
    folder, client = (context.node_config.get(name) for name in ("state-folder", "partition-id"))
    if isinstance(folder, str) and folder and type(client) is int and client >= 0:
        return FolderStore(Path(folder).expanduser(), client)
    return ContextStore(context.state)


@contextmanager
def counted_if_it_fails(request: RequestMessage, store: Store, limits: Limits) -> Iterator[None]:
    """Count a request if the block, which makes the site, fails. A site that was made counts its requests itself.

    Raises:
        Refusal: the run's name is not valid, or the request is above a limit.
    """
    if not wire.is_run(request.run):
        raise Refusal(Code.MALFORMED, f"{request.run[:80]!r} is not the name of a run")
    with store.counting():
        before = store.request_counts()
        after = before.next(request.run, "", request.round if request.phase else -1)  # no contract without a site
        limits.check_request_counts(after)
        store.save_request_counts(after)
    yield
    with store.counting():
        if store.request_counts() == after:
            store.save_request_counts(before)


def client_app(make: Callable[..., Site], *, agrees: bool = False) -> ClientApp:
    """Return a ClientApp that runs the phases of its site's algorithm when asked by name, and nothing else.

    Args:
        make: a function (run configuration, node configuration) -> `Site`. It is called once per process and run,
            within the limits of the node configuration. A process that serves several messages (see
            `fedbilevel.flower.launch.supernode`) keeps samples and compiled programs.
        agrees: whether the sites agree on a text before the run, and compute in float64. `make` then has the text as a
            third argument: it is called first with "", and again with the text.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        keep_on_disk_if_possible()  # Flower's own SuperNode starts a new process for every message
    app, app_hash, refusals = ClientApp(), hash_of_app(), RefusalLog()
    runtimes: dict[int, tuple[Any, ClientRuntime]] = {}  # node -> (arguments of `make`, the runtime)
    makings: dict[int, TimeLimit] = {}  # node -> the time limit of a `make` that failed

    def runtime_of(request: RequestMessage, context: Context) -> ClientRuntime:
        made: tuple[Any, ...] = (context.run_config, context.node_config)
        if agrees:
            made = (*made, store_of(context).agreement(request.run).text)
        wanted = context.run_id, request.run if agrees else "", *made
        known, runtime = runtimes.get(context.node_id, (None, None))
        if runtime is None or known != wanted:
            limits = Limits.of(context.node_config)
            making = TimeLimit(limits.max_seconds, "making this client", limits.max_memory)
            making = makings.setdefault(context.node_id, making)
            store = store_of(context)
            kept = store if isinstance(store, FolderStore) else None

            def new() -> ClientRuntime:
                return ClientRuntime(make(*made), True, app_hash, refusals, kept)

            with counted_if_it_fails(request, store, limits):
                runtime = making.run(in_precision_of_here(new))
            del makings[context.node_id]
            runtimes[context.node_id] = wanted, runtime
        return runtime

    @app.query(wire.ACTION)
    def respond(message: Message, context: Context) -> Message:
        request = RequestMessage(run="", contract="")
        try:
            request = wire.decode(RequestMessage, message)
            with jax.enable_x64(True) if agrees else nullcontext():
                response = runtime_of(request, context).respond(request, store_of(context))
            said = wire.encode(response)
        except Exception as error:  # noqa: BLE001  logged and sent
            number = context.node_config.get("partition-id")
            client = number if type(number) is int else -1
            blank = ResponseMessage(run="", round=0, exchange=0, client=client)
            response = blank.refusing(refusals.refusal(client, error, "no reply"))
            with logged_if_not_written(response, refusals, "no reply"):
                audit(store_of(context), response, request, app_hash, "")
            said = wire.encode(response)
        return Message(said, reply_to=message)

    return app
