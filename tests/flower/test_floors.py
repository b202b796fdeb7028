"""A client refuses requests that fall below its floors or exceed its limits, whichever server sends them."""

import fcntl
import re
import threading
from dataclasses import replace

import federations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federations import memory
from test_site import asked, greeted, request

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.config import static
from fedbilevel.core.errors import CheckpointError, ConfigurationError, FloorError
from fedbilevel.flower import wire
from fedbilevel.flower.client.limits import Limits, RequestCounts
from fedbilevel.flower.client.site import ClientRuntime, _samples, client_app
from fedbilevel.flower.client.store import FolderStore
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.wire import RequestMessage, ResponseMessage
from fixed_steps import fixed
from refusals import raises_with, refuses

STEPS = federations.Steps()


def test_the_floors_that_everyone_has():
    limits = Limits()
    assert (limits.min_batch_size, limits.min_local_samples) == (8, 8)
    with refuses("Limits.min_batch_size", 9, "max_batch_size = 8"):
        Limits(min_batch_size=9, max_batch_size=8)


@pytest.mark.parametrize(("batch_size", "refused"), [(1, True), (7, True), (8, False), (None, False)])
def test_small_batches_are_refused_at_the_greeting(batch_size, refused):
    task = federations.quadratic(clients=2, dim_x=2, dim_y=3, samples=(9, 9))
    site = federations.site(federations.Steps(batch_size=batch_size), 0, task, limits=Limits())
    runtime = ClientRuntime(site)
    expected = f"batch_size = {batch_size} is below this client's floor of 8" if refused else ""
    assert greeted(runtime, runtime.contract.text).refused == expected


class Sly(federations.Steps):
    """Draw batches whose size is in another field than `batch_size`."""

    few: int = static(default=3)

    @authoring.phase
    def y_gradient(self, client, message, key):
        gradient = jax.grad(client.problem.inner, 1)(*message, client.inner_batch(key, self.few))
        return authoring.Reply(gradient, gradients=1)


def test_the_floor_is_where_samples_are_drawn():
    """A floor is checked where samples are drawn, so that it holds whichever field has the size of the batches."""
    limits = replace(federations.FREE, min_batch_size=4)
    runtime = ClientRuntime(federations.site(Sly(batch_size=None), 0, limits=limits))
    assert asked(runtime).refused == "a draw of 3 samples is below this client's floor of 4"
    assert asked(runtime, "x_gradient").refused == ""


def test_walks_sample_by_sample_have_the_floor_too():
    """Steps over single samples in turn have the floor, too, and a server cannot choose the number of such steps."""
    rows = fb.Clients([{"a": np.arange(9.0)}]).inner
    samples, key = _samples(rows, 4), jax.random.key(0)
    with raises_with(FloorError, "a draw of 3 samples", floor=4):
        samples.in_turn(key, 3)
    with raises_with(FloorError, "a server chooses", floor=4):
        jax.jit(lambda steps: samples.in_turn(key, steps)[2])(jnp.asarray(5))
    assert int(samples.in_turn(key, 4)[2]) == 4
    assert int(samples.in_turn(None, None)[2]) == 9
    assert int(_samples(rows).in_turn(key, 1)[2]) == 1  # without a floor, as in a simulation


def test_an_epochs_short_batch_has_the_floor_too():
    """The last batch of an epoch, which may be short, has the floor, too.

    Two epochs of 11 samples have 4 batches of 4 samples if the short ones are dropped, 4 batches of 7 and 4 samples, or
    2 batches of 11 samples.
    """
    rows = fb.Clients([{"a": np.arange(11.0)}]).inner
    samples, key = _samples(rows, 4), jax.random.key(0)
    with raises_with(FloorError, "drop_last=True", floor=4):
        samples.in_epochs(key, 1, 4, False)  # batches of 4, 4 and 3 samples
    with raises_with(FloorError, "a draw of 3 samples", floor=4):
        samples.in_epochs(key, 1, 3, False)
    assert [samples.in_epochs(key, 2, n, drop)[0] for n, drop in ((4, True), (7, False), (20, False))] == [4, 4, 2]


@pytest.mark.parametrize(("epochs", "refused"), [(3, False), (4, True)])
def test_epochs_have_the_limit_of_local_steps(epochs, refused):
    """The steps of local epochs are limited by max_local_steps.

    An epoch over 9 samples in batches of 3 has 3 steps, so that a limit of 10 steps allows 3 epochs and not 4.
    """
    task = federations.quadratic(clients=2, dim_x=2, dim_y=3, samples=(9, 9))
    method = fixed(fb.AggITD(inner=fb.parts.LocalSGD(local_epochs=epochs, rounds=2), batch_size=3))
    runtime = ClientRuntime(federations.site(method, 0, task, limits=replace(federations.FREE, max_local_steps=10)))
    expected = f"inner.local_epochs = {epochs} is above this client's limit of 10 steps" if refused else ""
    assert greeted(runtime, runtime.contract.text).refused == expected


def test_a_site_with_steps_of_its_own_makes_no_epochs():
    """A site that states a number of local steps is refused if the method has local epochs."""
    problem = fb.SingleLevel(lambda x, batch: jnp.vdot(x, x))
    with refuses("Site.own['local_steps']", "3", "FedAvg.local_epochs = 1"):
        federations.site(fb.FedAvg(local_epochs=1), 0, problem=problem, own={"local_steps": 3})


def test_requests_of_a_round_and_of_all_runs(tmp_path):
    """A client replies to as many requests in a round, and in all runs together, as its limits allow.

    Another process of the client and another run continue the count.
    """
    limits = replace(federations.FREE, max_requests_per_round=2, max_requests=5)
    site = federations.site(STEPS, 0, limits=limits, folder=tmp_path)
    runtime = ClientRuntime(site)
    assert asked(runtime, payload=b"1").refused  # a request that cannot be read is not counted
    assert [asked(runtime, round=1).refused for _ in range(2)] == ["", ""]
    assert asked(runtime, round=1).code == "limit"
    assert asked(runtime, round=0).code == "limit"  # an earlier round does not begin a new count
    assert asked(runtime, round=2).refused == ""
    runtime = ClientRuntime(site)  # another process
    other = "f" * 16  # and another run
    assert [asked(runtime, run=other).refused for _ in range(2)] == ["", ""]
    assert "5 requests in all" in asked(runtime, run=other, round=9).refused
    assert FolderStore(tmp_path, 0).request_counts() == RequestCounts(
        5, other, runtime.contract.digest, 2, 2, refusals=1
    )


def test_greetings_are_requests_and_come_before_the_first_round():
    """Greetings are counted as requests of their own round, before round 0.

    So a client that may reply to two requests of a round still replies to two requests of round 0 after two greetings.
    """
    limits, kept = replace(federations.FREE, max_requests_per_round=2, max_requests=7), memory()
    runtime = ClientRuntime(federations.site(STEPS, 0, limits=limits))
    greet = lambda: runtime.respond(RequestMessage(run=federations.NAME, contract=runtime.contract.text), kept)  # noqa: E731
    assert [greet().code for _ in range(3)] == ["", "", "limit"]
    assert [runtime.respond(request(runtime, round=0), kept).code for _ in range(3)] == ["", "", "limit"]
    assert greet().code == "limit"  # a later greeting counts in the round that has begun
    assert runtime.respond(request(runtime, round=1), kept).code == ""
    assert kept.request_counts() == RequestCounts(5, federations.NAME, runtime.contract.digest, 1, 1)


def test_a_further_contract_of_a_run_begins_with_a_round_of_its_own(tmp_path):
    """If a run has a second contract, its rounds are counted anew.

    The first contract has come to round 9. Requests for round 0 of the second contract are counted separately from this
    round.
    """
    limits = replace(federations.FREE, max_requests_per_round=2)
    first, second = (
        ClientRuntime(federations.site(federations.Steps(batch_size=size), 0, limits=limits, folder=tmp_path))
        for size in (None, 8)
    )
    assert [asked(first, round=9).code for _ in range(2)] == ["", ""]
    assert [asked(second, round=0).code for _ in range(3)] == ["", "", "limit"]
    assert asked(second, round=1).code == ""


@pytest.mark.parametrize("kept", ["in a folder", "by Flower"])
def test_requests_for_which_no_site_can_be_made_are_counted(kept, tmp_path):
    """Requests for which no site can be made are counted, and after max-requests no more attempts are made.

    Each attempt may cost the client much. If a site is made, the site counts the request itself, so that it is counted
    once.
    """
    tries, broken = [], [True]
    limits, folder = Limits(max_requests=3), tmp_path / "state" if kept == "in a folder" else None

    def make(run, node):
        tries.append(node)
        if broken[0]:
            raise ConfigurationError("task.dim_x = 'many'")
        return federations.site(STEPS, 0, limits=replace(federations.FREE, max_requests=3), folder=folder)

    grid = InProcess(client_app(make), 1)
    grid.contexts[1].node_config |= {"max-requests": limits.max_requests}
    if folder:
        grid.contexts[1].node_config |= {"state-folder": str(folder)}

    def ask(run=federations.NAME, **more):
        message = wire.request_message(1, RequestMessage(run=run, contract="", **more), 100.0)
        (number,) = grid.push_messages([message])
        return wire.decode(ResponseMessage, grid.pull_messages([number])[0]).code

    assert ask(run="no name") == "malformed"
    assert [ask(), ask(phase="x", round=1)] == ["settings"] * 2
    assert len(tries) == 2
    broken[0] = False
    assert ask() == "contract"  # the third request, which is counted once
    assert ask() == "limit"
    broken[0] = True
    grid.contexts[1].node_config |= {"max-seconds": 5.0}  # now the site would be made anew
    assert ask() == "limit"
    assert len(tries) == 3


def test_what_is_outside_of_the_limits_is_not_traced(monkeypatch):
    monkeypatch.setattr(wire, "draw_up", lambda *_: pytest.fail("it is traced"))
    runtime = ClientRuntime(federations.site(STEPS, 0, limits=Limits()))
    assert greeted(runtime, "").refused == "batch_size = 4 is below this client's floor of 8"


def unending(sign, memory):
    """Run for ever instead of making a site, and set `sign` when this is stopped."""
    try:
        held = []
        while True:
            held += [np.ones(memory)] if len(held) < 3 else []
    finally:
        sign.set()


@pytest.mark.parametrize(("config", "memory", "why"), [
    ({"max-seconds": 0.2}, 1, r"takes longer than this client's limit of 0\.2 s"),
    ({"max-memory": 2**24}, 2**23, "takes more memory than this client's limit of 16777216 bytes"),
])  # fmt: skip
def test_what_makes_a_site_is_stopped_at_its_limits(config, memory, why):
    """The function that makes a site is stopped at the client's limits of time and memory, and the server is told."""
    sign, grid = threading.Event(), InProcess(client_app(lambda run, node: unending(sign, memory)), 1)
    grid.contexts[1].node_config |= config
    message = wire.request_message(1, RequestMessage(run=federations.NAME, contract=""), 100.0)
    (number,) = grid.push_messages([message])
    (reply,) = grid.pull_messages([number])
    said = wire.decode(ResponseMessage, reply)
    assert (said.code, said.client) == ("limit", 0)
    assert re.search(why, said.refused)
    assert sign.wait(60)


def test_nobody_else_counts_between_reading_a_count_and_writing_it(tmp_path, monkeypatch):
    """While one process counts a request, no other process of the site can read or write the count.

    Otherwise the other process could overwrite the new count with one that it has read before.
    """
    save_request_counts, tries = FolderStore.save_request_counts, []

    def noted(store, request_counts):
        with open(store.lock) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tries.append(request_counts.total)
        save_request_counts(store, request_counts)

    monkeypatch.setattr(FolderStore, "save_request_counts", noted)
    runtime = ClientRuntime(federations.site(STEPS, 0, folder=tmp_path))
    assert [asked(runtime, round=round).refused for round in (1, 2)] == ["", ""]
    assert tries == [1, 2]


@pytest.mark.parametrize("damaged", ["", "[]", '{"total": "5"}', '{"total": 1, "rounds": 2}', "{" * 100])
def test_a_damaged_count_is_no_new_beginning(tmp_path, damaged):
    store = FolderStore(tmp_path, 0)
    store.count.write_text(damaged)
    with raises_with(CheckpointError, path=store.count, errno=None):
        store.request_counts()
    runtime = ClientRuntime(federations.site(STEPS, 0, folder=tmp_path))
    assert asked(runtime).refused == "CheckpointError; the client's log says more"


def test_a_count_without_a_folder_stays_with_flower():
    kept = memory()
    runtime = ClientRuntime(federations.site(STEPS, 0, limits=replace(federations.FREE, max_requests=2)))
    assert [bool(runtime.respond(request(runtime), kept).refused) for _ in range(3)] == [False, False, True]
    assert kept.request_counts() == RequestCounts(2, federations.NAME, runtime.contract.digest, 2, 2)
