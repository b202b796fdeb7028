"""A client replies to good requests, refuses all others without running anything, and reveals nothing more."""

import gc
import json
import logging
import re
import threading
import time
import weakref
from dataclasses import replace

import federations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import memory
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.config import static
from fedbilevel.core.errors import ExchangeError
from fedbilevel.core.privacy import Privacy, PrivacyAccount
from fedbilevel.core.tree import XY
from fedbilevel.flower.client import phases as site_phases
from fedbilevel.flower.client import site as sites
from fedbilevel.flower.client.limits import Limits, TimeLimit
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import RequestMessage, from_bytes
from refusals import codes, raises_with, refuses

STEPS = federations.Steps()
PRIVATE = Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)
FAILED = (
    "the phase failed; the client's log says more. One possible cause: privacy adds noise of standard deviation 1 "
    "(noise multiplier × clip) to every number, and the step size scales this noise: lower the step sizes, clip or the "
    "noise multiplier"
)


@pytest.fixture(scope="module")
def runtime():
    return ClientRuntime(federations.site(STEPS, 0))


@pytest.fixture
def ran(monkeypatch):
    """Return a list that gets the name of each phase that a client runs."""
    phases, program = [], site_phases.program

    def noted(problem):
        return lambda phase, *rest: phases.append(phase) or program(problem)(phase, *rest)

    monkeypatch.setattr(site_phases, "program", noted)
    return phases


def request(runtime, of="y_gradient", **changes):
    """Return a good request for a phase at x = y = 1, with these changes."""
    call = next(call for call in runtime.contract.calls.values() if call.phase == of)
    parts = [np.ones(leaf.shape, leaf.dtype).tobytes() for leaf in jax.tree.leaves(call.message)]
    good = RequestMessage(
        run=federations.NAME, contract=runtime.contract.digest, round=2, exchange=1, phase=of, call=call.name,
        key=np.asarray(jax.random.key_data(jax.random.key(5))).tobytes(), key_kind="threefry2x32", weight=0.25,
        payload=b"".join(parts))  # fmt: skip
    return replace(good, **changes)


def asked(runtime, of="y_gradient", **changes):
    """Return a client's response to such a request, with nothing in Flower's memory of the client."""
    return runtime.respond(request(runtime, of, **changes), memory())


def greeted(runtime, contract):
    return runtime.respond(RequestMessage(run=federations.NAME, contract=contract), memory())


@pytest.mark.checked
def test_a_site_looks_at_its_losses_before_it_takes_part():
    """A site checks its losses before it takes part, as a simulation does, since the server has no samples for it."""
    task = federations.TASK
    summed = fb.Bilevel(lambda x, y, batch: len(batch["t"]) * task.problem.outer(x, y, batch), task.problem.inner)
    with pytest.warns(fb.errors.NumericalWarning, match="the outer loss is not a mean"):
        ClientRuntime(federations.site(STEPS, 0, problem=summed))


def test_an_answer(runtime, ran):
    """A reply has the update and the metrics of the phase, computed here with the key that every engine uses."""
    response = asked(runtime)
    assert response.refused == ""
    clients, key = federations.TASK.clients, jax.random.fold_in(jax.random.key(5), 0)
    batch = sites._samples(sites.Ragged.listed("inner", [clients.inner.row(0)])).batch(key, 4)
    loss, gradient = jax.value_and_grad(federations.TASK.problem.inner, 1)(jnp.ones(2), jnp.ones(3), batch)
    np.testing.assert_allclose(from_bytes(response.payload, gradient), gradient, rtol=1e-12)
    assert response.numbers() == {"inner": pytest.approx(float(loss), rel=1e-12)}
    assert (response.run, response.round, response.exchange, response.client) == (federations.NAME, 2, 1, 0)
    assert (response.gradients, response.hvps, response.epsilon) == (1, 0, 0.0)
    assert response.layout == ["value float64[3]"]
    assert ran == ["y_gradient"]


def test_a_greeting(runtime, ran):
    """The response to a greeting has the client's contract, or says how it differs from the server's."""
    response = greeted(runtime, runtime.contract.text)
    assert (response.contract, response.client, response.refused) == (runtime.contract.text, 0, "")
    other = ClientRuntime(federations.site(federations.Steps(batch_size=5), 0)).contract.text
    assert greeted(runtime, other).refused == "hyperparameters.batch_size is 5 at the server and 4 at the site"
    assert ran == []


REFUSED = {
    "an unknown phase": ({"phase": "gradient"}, "contract"),
    "no phase but a method": ({"phase": "round"}, "contract"),
    "a question to a client without `Site.answer`": ({"phase": "a question", "payload": b"?"}, "contract"),
    "another contract": ({"contract": "0" * 32}, "contract"),
    "another call": ({"call": "y_gradient:0"}, "contract"),
    "another shape": ({"payload": np.ones(6).tobytes()}, "malformed"),
    "a NaN": ({"payload": np.array([1, np.nan, 1, 1, 1]).tobytes()}, "numbers"),
    "a number for no field": ({"own": '{"outer_steps": 3}'}, "contract"),
    "a count that is none": ({"own": '{"local_steps": 0}'}, "contract"),
    "own numbers that are none": ({"own": '{"local_steps": "3"}'}, "malformed"),
    "own numbers without names": ({"own": "[3]"}, "malformed"),
    "no weight": ({"weight": 0.0}, "malformed"),
    "a weight of NaN": ({"weight": float("nan")}, "malformed"),
    "a round before the first": ({"round": -1}, "malformed"),
    "a round beyond integers": ({"round": 2**40}, "malformed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_not_run(case, runtime, ran, caplog):
    changes, code = REFUSED[case]
    response = asked(runtime, **changes)
    assert response.code == code
    assert (response.payload, response.metrics, response.layout) == (b"", "{}", [])
    assert ran == []
    (record,) = caplog.records
    assert record.name == "fedbilevel.client"
    assert response.refused in record.getMessage()


@pytest.mark.parametrize("changes", [{"key": b"123"}, {"key": b""}, {"key_kind": "dice"}])
def test_a_key_that_is_none_is_refused(changes, runtime, ran):
    """A key that cannot be read is refused with the name of the error only, since its text may have private data."""
    assert "Error; the client's log says more" in asked(runtime, **changes).refused
    assert ran == []


@pytest.mark.parametrize(("limits", "expected"), [
    ({"max_batch_size": 3}, "batch_size = 4 is above this client's limit of 3"),
    ({"min_batch_size": 5}, "batch_size = 4 is below this client's floor of 5"),
    ({"min_local_samples": 7}, "this client has fewer samples than its floor of 7"),
    ({"max_local_steps": 2}, "inner_rounds = 3 is above this client's limit of 2 steps"),
    ({"max_bytes": 39}, "40 bytes are above this client's limit of 39"),
])  # fmt: skip
def test_limits(limits, expected, ran):
    """A client refuses a request beyond a limit, and runs nothing; x and y of the message have 5 · 8 = 40 bytes."""
    algorithm = Rounds() if "max_local_steps" in limits else STEPS
    runtime = ClientRuntime(federations.site(algorithm, 0, limits=replace(federations.FREE, **limits)))
    assert asked(runtime).refused == expected
    assert ran == []
    if "max_bytes" not in limits:  # the greeting is refused, too
        assert greeted(runtime, runtime.contract.text).refused == expected


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("limits", "code", "facts"), [
    ({"max_local_steps": 8}, Code.LIMIT, ("solver.terms = [2, 9]", "8 steps")),
    ({"max_local_steps": 9}, Code.LIMIT, ("inner.rounds = 10", "9 steps")),
    ({"max_batch_size": 15}, Code.LIMIT, ("batch_size = 16", "limit of 15")),
    ({"min_batch_size": 17}, Code.FLOOR, ("batch_size = 16", "floor of 17")),
])  # fmt: skip
def test_counts_of_parts_and_of_wrapped_methods_are_limited(limits, code, facts, wrapped):
    """Limits apply to the counts of parts and of wrapped methods, however deep these are.

    If a field has several counts, the largest one is compared. Counts of samples and counts of steps have limits of
    their own.
    """
    inner, solver = fb.parts.MeanGradient(rounds=10, local_steps=3), fb.parts.Neumann(terms=[2, 9])
    method = fb.AFBO(inner=inner, hypergradient=fb.parts.LocalImplicit(solver=solver), batch_size=16)
    method = fb.Asynchronous(method, wait_for=2) if wrapped else method
    Limits(max_local_steps=10, max_batch_size=16, min_batch_size=16).check_algorithm(method)
    with raises_with(Refusal, code=code) as error:
        Limits(**limits).check_algorithm(method)
    assert all(fact in error.value.why for fact in facts)


class Rounds(federations.Steps):
    """`Steps` with a field that is a count of clients' work."""

    inner_rounds: int = static(default=3)


def test_numbers_that_the_server_says_and_those_of_the_site(ran):
    """A site's limit bounds the server's number of local steps, and a number that the site states takes precedence."""
    method, limits = fb.FedNestSGD(batch_size=4), replace(federations.FREE, max_local_steps=20)

    def answer(steps, **own):
        client = ClientRuntime(federations.site(method, 0, limits=limits, **own))
        said = f'{{"local_steps": {steps}}}'
        return client.respond(request(client, of="inner.descent", own=said), memory())

    assert answer(21).refused == "local_steps = 21 is above this client's limit of 20 steps"
    assert ran == []
    two, four, stated = answer(2), answer(4), answer(4, own={"local_steps": 2})
    assert (two.gradients, four.gradients, stated.gradients) == (2, 4, 2)
    assert stated.payload == two.payload != four.payload
    with refuses("name in the clients' own numbers for Layered", "loca_steps", near="local_steps"):
        federations.site(method, 0, own={"loca_steps": 2})
    with refuses("Site.own", [1]):
        federations.site(method, 0, own=[1])
    with refuses("Site.own['local_steps']", (1, 5)):
        federations.site(method, 0, own={"local_steps": (1, 5)})


@pytest.mark.parametrize("most", [None, 2**40])
def test_a_task_that_takes_too_long(most):
    """A task that takes too long is given up, and no other task is run until it ends.

    If there is also a limit of memory, the thread of the task is stopped at its next line of Python. A thread that
    waits inside one call into C, here for a lock, reaches no such line, so it is not stopped.
    """
    lock, time_limit = threading.Lock(), TimeLimit(0.05, "the task", most)
    lock.acquire()
    with raises_with(Refusal, "limit of 0.05 s", code=Code.LIMIT):
        time_limit.run(lock.acquire)
    with raises_with(Refusal, "still running", code=Code.LIMIT):
        time_limit.run(lambda: 1)
    lock.release()
    time_limit.thread.join(60)
    assert time_limit.run(lambda: 1) == 1
    with pytest.raises(KeyError):
        time_limit.run(lambda: {}[0])
    with refuses("Limits.max_seconds", 0):
        Limits(max_seconds=0)


def test_one_thread_runs_all_phases_until_one_overruns():
    """One thread runs all phases, until a phase takes too long; then another thread takes its place.

    A thread ends with the `TimeLimit` that started it, and keeps no object of a phase that has ended.
    """
    time_limit, go = TimeLimit(0.05), threading.Event()
    first = time_limit.run(threading.current_thread)
    assert time_limit.run(threading.current_thread) is first
    assert first.daemon
    thing = threading.Event()
    gone = weakref.ref(thing)
    time_limit.run(lambda thing=thing: None)
    del thing
    wait_until(lambda: gone() is None)
    with pytest.raises(Refusal, match="takes longer"):  # no reference to the time limit may remain
        time_limit.run(go.wait)
    go.set()
    first.join(5)
    second = time_limit.run(threading.current_thread)
    assert not first.is_alive()
    assert second.is_alive()
    del time_limit
    second.join(5)
    assert not second.is_alive()


def wait_until(condition, seconds=5.0):
    """Wait until `condition()` is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_phase_that_was_given_up_leaves_no_trace(tmp_path, monkeypatch):
    """A phase that was given up changes neither the client's state nor its account, even if it ends later."""
    go = threading.Event()
    monkeypatch.setattr(site_phases.SitePhases, "run", lambda *_: go.wait(30) and authoring.Reply(jnp.ones(3), state={
        "calls": jnp.ones((), jnp.int32), "control": jnp.ones(3)}))  # fmt: skip
    limits = replace(federations.FREE, max_seconds=0.05)
    runtime = ClientRuntime(federations.site(TwoPhase(), 0, limits=limits, privacy=PRIVATE, folder=tmp_path))
    assert asked(runtime, "inner_gradient").refused == FAILED
    go.set()
    runtime.phases.time_limit.thread.join(30)
    assert (tmp_path / "account.json").read_text() == "{}"
    assert list(tmp_path.glob("*.npz")) == []
    assert (tmp_path / "client-0-requests.json").exists()  # the request is counted
    runtime.phases.time_limit.seconds = 30  # the next one has time enough, however busy the machine is
    assert asked(runtime, "inner_gradient").refused == ""
    assert [path.name for path in tmp_path.glob("*.npz")] == [f"client-0-run-{federations.NAME}.npz"]


class Dividing(authoring.Algorithm):
    """Divide by the message, in the only phase."""

    def init(self, x, y):
        return XY(x, y)

    @authoring.phase
    def phase(self, client, message, key):
        return authoring.Reply(client.outer_batch(key, 2)["t"][0] / message)

    def round(self, fed, state, key):
        return XY(state.x, state.y + fed.mean(self.phase, jnp.zeros(()), key))


def test_a_reply_that_is_not_finite_is_not_sent(tmp_path, caplog):
    """A reply that is not finite is not sent, and the refusal says in which leaf it is not finite.

    Under privacy the refusal does not say this, since it depends on the data.
    """
    runtime = ClientRuntime(federations.site(Dividing(), 0))
    zero = np.zeros(1).tobytes()
    response = asked(runtime, "phase", payload=zero)
    assert response.refused.startswith("the reply is not finite in ")
    assert response.payload == b""
    runtime = ClientRuntime(federations.site(Dividing(), 0, privacy=PRIVATE, folder=tmp_path))
    assert asked(runtime, "phase", payload=zero).refused == FAILED
    assert (tmp_path / "account.json").read_text() == "{}"


def test_privacy(tmp_path):
    """Under privacy replies are clipped and noised, metrics and counts are not sent, and each reply is charged.

    A new process continues the account. The noise has the deviation 0.5 · 2 = 1, so that each of three numbers is off
    by less than 9.5. When the budget is spent, the client refuses to reply.
    """
    privacy = Privacy(clip=0.5, noise_multiplier=2.0, delta=1e-5, budget=12.0)
    make = lambda: ClientRuntime(federations.site(STEPS, 0, privacy=privacy, folder=tmp_path))  # noqa: E731
    plain, runtime = ClientRuntime(federations.site(STEPS, 0)), make()
    answers = [asked(runtime), asked(runtime), asked(runtime := make())]
    assert [response.epsilon for response in answers] == pytest.approx([privacy.epsilon_after(n) for n in (1, 2, 3)])
    assert all(a.refused == "" and (a.metrics, a.gradients, a.hvps, a.delta) == ("{}", 0, 0, 1e-5) for a in answers)
    sent = [np.frombuffer(response.payload) for response in (asked(plain), *answers)]
    assert len({vector.tobytes() for vector in sent}) == 4
    clipped = sent[0] * min(1, 0.5 / np.linalg.norm(sent[0]))
    assert all(0 < np.linalg.norm(vector - clipped) < 9.5 * 3**0.5 for vector in sent[1:])  # noise
    most = next(n for n in range(1, 100) if privacy.epsilon_after(n + 1) > 12.0)
    for _ in range(3, most):
        assert asked(runtime).refused == ""
    assert asked(runtime).refused.startswith(f"privacy budget spent: after {most} replies, another reply would")
    assert PrivacyAccount.from_json((tmp_path / "account.json").read_text()).total == most


def test_a_spent_budget_stops_the_run(tmp_path):
    """When the budgets of the clients are spent, the run ends, and the error says why.

    A budget is enough for one reply, so that the second exchange has none.
    """
    one = PRIVATE.epsilon_after(1)
    privacy = replace(PRIVATE, budget=one * 1.001)
    app = federations.client_app(lambda run, node: federations.site(
        STEPS, node["partition-id"], privacy=privacy, folder=tmp_path / str(node["partition-id"])))  # fmt: skip
    log = tmp_path / "log.jsonl"
    with raises_with(ExchangeError, "after 1 replies", round=0, phase="x_gradient", replies=0) as error:
        federations.solve(STEPS, InProcess(app, 6), log=log, terms=Terms(join=1.0))
    assert Code.BUDGET in codes(error).values()
    first = json.loads(log.read_text().splitlines()[0])
    assert len(first["answered"]) == 4
    assert first["epsilon"] == pytest.approx(one)


def test_privacy_needs_a_folder():
    with refuses("Site.folder", None, "privacy"):
        federations.site(STEPS, 0, privacy=PRIVATE)


def test_an_account_belongs_to_one_client_and_never_begins_anew(tmp_path):
    make = lambda client: ClientRuntime(federations.site(STEPS, client, privacy=PRIVATE, folder=tmp_path))  # noqa: E731
    runtime, account = make(1), tmp_path / "account.json"
    assert json.loads(account.read_text()) == {}
    with refuses("Site.id", 2, "1, the client"):
        make(2)
    assert asked(runtime).refused == ""
    kept = account.read_text()
    assert PrivacyAccount.from_json(kept).total == 1
    account.unlink()
    assert asked(runtime).refused == "ConfigurationError; the client's log says more"
    with refuses("", fact="is missing", where=str(account)):
        make(1)
    assert not account.exists()
    account.write_text(kept)
    (tmp_path / "secret").unlink()  # another secret is made, and the account stays as it is
    make(1)
    assert account.read_text() == kept


def test_logs_tell_nothing_of_data_or_updates(caplog):
    """Logs have no sample and no number of an update or a metric.

    All samples are 0.7331… here. The numbers of the updates and of the metric are those of two replies.
    """
    caplog.set_level(logging.DEBUG, "fedbilevel")
    caplog.set_level(logging.INFO)
    mark = 0.733173317331
    site = federations.site(STEPS, 0)
    outer, inner = jax.tree.map(lambda a: np.full_like(a, mark), (site.outer, site.inner))
    site = replace(site, outer=outer, inner=inner)
    runtime = ClientRuntime(site)
    answers = [asked(runtime, phase) for phase in ("y_gradient", "x_gradient")]
    asked(runtime, payload=b"1")
    asked(runtime, round=-1)
    updates = np.concatenate([np.frombuffer(response.payload) for response in answers])
    secrets = {f"{abs(value):.8f}"[:6] for value in (mark, *updates, answers[0].numbers()["inner"]) if value}
    assert len(secrets) == 3
    assert len(caplog.records) >= 4
    assert "bytes in" in caplog.text
    assert not [secret for secret in secrets if secret in caplog.text]


def test_a_log_begins_with_what_the_client_has_and_says_in_a_line_what_leaves_it(caplog, tmp_path):
    caplog.set_level(logging.INFO, "fedbilevel.client")
    terms = Privacy(clip=1.0, noise_multiplier=10.0, delta=1e-5)
    limits = Limits(min_local_samples=5, min_batch_size=2)
    site = federations.site(STEPS, 3, privacy=terms, folder=tmp_path, limits=limits)
    runtime = ClientRuntime(site)
    for exchange in range(2):
        assert asked(runtime, exchange=exchange).refused == ""
    begin, *lines = [record.getMessage() for record in caplog.records]
    for part in (
        "client 3: samples 6 outer, 6 inner, of ['D'] float64[1, 3, 3], ['E'] float64[1, 2, 3], ",
        f"folder {tmp_path}",
        "privacy clip 1, noise 10; ε = 0.795 for a reply, 0 so far, at δ = 1e-05, no budget",
        "floors 5 samples, batches of 2",
    ):
        assert part in begin
    assert len(lines) == 2
    for line, number in zip(lines, (1, 2), strict=True):
        assert "phase 'y_gradient': sent 24 bytes in" in line
        assert line.endswith(f"ε = {terms.epsilon_after(number):.4g} so far")


def test_refusals_for_one_reason_have_few_lines(caplog):
    """Of refusals with one reason, the first, second, fourth, and so on since the last reply are logged.

    After a hundred different reasons, refusals are counted by their kind.
    """
    runtime = ClientRuntime(federations.site(STEPS, 0))
    caplog.set_level(logging.WARNING, "fedbilevel.client")

    def lines(requests):
        caplog.clear()
        for changes in requests:
            assert asked(runtime, **changes).refused
        return caplog.messages

    found = lines([{"payload": b"1", "round": round} for round in range(9)])
    assert [re.search(r"round \d", line)[0] for line in found] == [f"round {one}" for one in (0, 1, 3, 7)]
    assert ["times since" in line for line in found] == [False, True, True, True]
    assert found[2].endswith("(4 times since the last reply)")
    assert len(lines([{"contract": "x"}])) == 1  # another reason
    assert lines([{"payload": b"1"}] * 6) == []
    assert asked(runtime).refused == ""
    assert len(lines([{"payload": b"1"}, {"contract": "x"}])) == 2
    assert len(lines([{"of": "y_gradient", "weight": 2.0 + one} for one in range(1000)])) <= 100 + 10


def test_samples_that_have_changed_are_said_and_refused_where_the_owner_said_so(caplog, tmp_path):
    """If a client's samples have changed, its log has one warning; with `same_data` each request is refused.

    With `same_data` the hash of the earlier samples stays until the owner deletes its file.
    """
    one = federations.site(STEPS, 0, folder=tmp_path)
    other = replace(one, inner=jax.tree.map(lambda leaf: leaf + 1, one.inner))
    for site, warned in ((one, 0), (one, 0), (other, 1), (other, 0), (one, 1)):
        caplog.clear()
        assert asked(ClientRuntime(site)).refused == ""
        assert sum("differ from its earlier ones" in text for text in caplog.messages) == warned
    for _ in range(2):
        response = asked(ClientRuntime(replace(other, same_data=True)))
        assert response.refused == "this client's samples have changed"
    (tmp_path / "client-0-samples.json").unlink()
    assert asked(ClientRuntime(replace(other, same_data=True))).refused == ""
    with refuses("Site.folder", None, "same_data"):
        replace(one, folder=None, same_data=True)


@pytest.mark.parametrize("same_data", [False, True])
def test_a_check_before_the_site_serves_stores_no_hash_of_its_samples(same_data, tmp_path, caplog):
    """A check of a site stores no hash of its samples, so that a table can be corrected before the site starts."""
    one = federations.site(STEPS, 0, folder=tmp_path, same_data=same_data)
    ClientRuntime(one, serving=False)
    assert not (tmp_path / "client-0-samples.json").exists()
    other = replace(one, inner=jax.tree.map(lambda leaf: leaf + 1, one.inner))
    assert asked(ClientRuntime(other)).refused == ""
    assert not any("differ from its earlier ones" in text for text in caplog.messages)
    assert asked(ClientRuntime(one)).refused == ("this client's samples have changed" if same_data else "")


def test_a_client_that_cannot_start_says_so(caplog):
    """A client that cannot start says so; it sends the class of an error that is not ours, and not its text.

    The text may have a path, or more.
    """

    def make(run, node):
        raise FileNotFoundError("/home/ward-7/patients.csv")

    grid = InProcess(federations.client_app(make), 1)
    with raises_with(ExchangeError, "client 0: FileNotFoundError", replies=0) as error:
        federations.solve(STEPS, grid, terms=Terms(join=1.0, deadline=2.0))
    assert codes(error) == {0: Code.FAILED, **dict.fromkeys(range(1, 6), Code.ABSENT)}
    assert "patients.csv" in caplog.text  # which is the client's own log


def test_a_phase_is_compiled_once():
    """A phase is compiled once, and not again for another round or weight.

    JAX calls a loss only while it traces a phase.
    """
    calls, task = [], federations.TASK.problem
    counted = fb.Bilevel(task.outer, lambda x, y, batch: calls.append(batch) or task.inner(x, y, batch))
    runtime = ClientRuntime(federations.site(STEPS, 0, problem=counted))
    before = len(calls)
    for round in range(5):
        assert asked(runtime, round=round, weight=0.1 + round / 10).refused == ""
        assert len(calls) == before + 1


def test_what_a_client_has_compiled_goes_with_its_problem():
    """A client's losses and programs are freed with its problem, so that no cache of JAX keeps them."""
    task = federations.TASK.problem
    problem = fb.Bilevel(lambda x, y, batch: task.outer(x, y, batch), lambda x, y, batch: task.inner(x, y, batch))
    one = ClientRuntime(replace(federations.site(STEPS, 0), problem=problem))
    assert asked(one).refused == ""
    kept = [weakref.ref(thing) for thing in (problem, problem.inner, site_phases.program(one.problem))]
    assert all(thing() is not None for thing in kept)
    del one, problem
    gc.collect()
    assert [thing() for thing in kept] == [None, None, None]
