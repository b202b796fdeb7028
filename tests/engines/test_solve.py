"""Does `solve` keep its promises: rows, callbacks, early stops, and errors that name what is wrong?"""

import contextlib
import errno
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines import checkpoint as files
from fedbilevel.engines import loop, saver
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import raises_with, refuses, warns_with

ALGORITHM = fixed(fb.SimFBO(local_steps=2, batch_size=4))
SUGGESTED = "fb.diagnose suggests"


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=6)


@pytest.fixture(scope="module")
def alike():
    """Return a task whose clients have equally many samples.

    If a run diverges, its round is repeated without compilation, so that all clients should have the same shapes.
    """
    return quadratic(clients=6, samples=(7, 7))


def run(task, algorithm=ALGORITHM, **options):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, **{"rounds": 7, **options})


def same_bits(a, b):
    return all(np.array_equal(p, q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def same_run(a, b):
    """Return whether state, rows and costs are the same, except for the seconds of this machine."""
    rows = [[{name: one for name, one in row.items() if name != "seconds"} for row in x.history.rows] for x in (a, b)]
    return same_bits(a.state, b.state) and rows[0] == rows[1] and a.ledger == b.ledger


def at(round, do):
    """Return a callback that calls `do` when this round is over."""
    return lambda result, row: do() if result.round == round else None


def test_rows_come_at_the_start_at_every_multiple_and_at_the_end(task):
    result = run(task, eval_every=3, metrics=task.metrics)
    assert result.history["round"].tolist() == [0, 3, 6, 7]
    assert result.history["exchanges"].tolist() == [0, 3, 6, 7]
    assert np.isnan(result.history["outer_loss"][0])
    assert np.all(np.isfinite(result.history["relative_error"]))
    assert result.ledger.exchanges_by_phase == {"local_updates": 7}


@pytest.mark.slow
@pytest.mark.checked
def test_without_jit_a_loss_can_be_looked_at_client_by_client(task):
    """Without jit, a loss gets each client's samples as numbers, and tracers only where a program is traced."""
    seen = []

    def inner(x, y, batch):
        seen.extend([] if isinstance(batch["c"], jax.core.Tracer) else [float(jnp.sum(batch["c"]))])
        return task.problem.inner(x, y, batch)

    problem = fb.Bilevel(outer=task.problem.outer, inner=inner)
    with jax.disable_jit():
        found = fb.solve(ALGORITHM, problem, task.clients, task.x0, task.y0, rounds=1, engine=fb.Reference())
    assert len(set(seen)) >= 6
    np.testing.assert_allclose(found.x, run(task, rounds=1).x, rtol=1e-12)


def test_the_cut_into_stretches_changes_no_bit(task, monkeypatch):
    """Rows, saves and the length of a stretch decide where the program returns, and change no bit of the results."""
    whole = run(task, eval_every=7)
    monkeypatch.setattr(loop, "STRETCH_SECONDS", 0.0)  # one round at a time
    pieces = run(task, eval_every=7)
    assert same_bits(whole.state, pieces.state)
    assert whole.history["outer_loss"][-1] == pieces.history["outer_loss"][-1]


def test_row_losses_are_means_over_the_rounds_since_the_row_before(task):
    each = run(task, eval_every=1).history["outer_loss"]
    some = run(task, eval_every=3).history["outer_loss"]
    np.testing.assert_allclose(some[1:], [each[1:4].mean(), each[4:7].mean(), each[7]], rtol=1e-14)


def test_same_key_same_bits_other_key_other_numbers(task):
    a, b, c = (run(task, cohort=3, key=key) for key in (5, 5, 6))
    assert same_bits(a.state, b.state)
    assert not same_bits(a.state, c.state)


def test_a_callback_stops_the_run(task):
    seen = []

    def watch(result, row):
        seen.append((result.round, row is not None))
        return "enough" if result.round >= 4 and row else None

    result = run(task, rounds=100, eval_every=2, callbacks=[watch])
    assert result.stopped == "enough"
    assert result.round == 4
    assert (0, True) in seen
    assert (2, True) in seen


def test_what_a_callback_keeps_stays_valid(task):
    """A result that a callback keeps stays valid, although the engine reuses the memory of the carry."""
    kept = []

    def keep(result, row):
        kept.append((result, jax.tree.map(np.array, (result.x, result.y, result.state))))

    run(task, eval_every=1, callbacks=[keep])
    assert len({np.asarray(result.x).tobytes() for result, _ in kept}) == 8
    for result, then in kept:
        assert same_bits((result.x, result.y, result.state), then)


@pytest.mark.parametrize(
    ("options", "path", "got", "fact"),
    [
        ({"rounds": 0}, "rounds", 0, "positive integer"),
        ({"rounds": 2.5}, "rounds", 2.5, "positive integer"),
        ({"cohort": 7}, "cohort", 7, "1 to 6"),
        ({"cohort": 0}, "cohort", 0, "1 to 6"),
        ({"cohort": True}, "cohort", True, "1 to 6"),
        ({"key": "a"}, "key", "a", "jax.random.key"),
        ({"metrics": ["accuracy"]}, "metrics", ["accuracy"], "(x, y)"),
        ({"eval_every": 0}, "eval_every", 0, "positive integer or None"),
        ({"resume": True}, "resume", True, "checkpoint"),
        ({"metrics": {"outer_loss": lambda x, y: jnp.sum(x)}}, "metrics", "outer_loss", "another name"),
        ({"metrics": {"pair": lambda x, y: x}}, "the value of metrics['pair']", ["float64[5]"], "one real number"),
        ({"engine": fb.Local(devices=64)}, "Local.devices", 64, "at most 6"),
    ],
)
def test_wrong_arguments_are_named(task, options, path, got, fact):
    with refuses(path, got, fact):
        run(task, **options)


@pytest.mark.parametrize("name", ["round", "exchanges", "outer_loss", "halvings", "diverged", "epsilon"])
def test_a_metric_has_no_name_of_another_column(task, name):
    """A metric with the name of a column that the history has, or has in some runs, is refused."""
    with refuses("metrics", name):
        run(task, metrics={name: lambda x, y: x @ x})


def test_a_loss_that_is_no_scalar_and_a_start_that_is_not_finite(task):
    problem = fb.Bilevel(outer=task.problem.outer, inner=lambda x, y, batch: batch["c"] @ y)
    with refuses("", fact="an array of shape (1,)", where="the inner loss"):
        fb.solve(ALGORITHM, problem, task.clients, task.x0, task.y0, rounds=1)
    with refuses("y0", ["value"], "finite"):
        fb.solve(ALGORITHM, task.problem, task.clients, task.x0, task.y0.at[2].set(np.nan), rounds=1)


def test_divergence_names_round_and_quantity(alike):
    """If a run diverges, the error names the round and the quantity.

    The clients' sums of five gradients are finite, and above 1.1 in some entry, so that the server's step of 1.7e308
    makes infinite numbers.
    """
    algorithm = fixed(fb.SimFBO(local_steps=5, batch_size=None, client_lr=1e-9, server_lr=fb.XYV(1e-3, 1.7e308, 1e-3)))
    with raises_with(fb.errors.NonFiniteError, SUGGESTED, round=0, during="server update", names=(".iterate.y",)):
        run(alike, algorithm, rounds=50)


@pytest.mark.parametrize("engine", [fb.Local(), fb.Reference()])
def test_a_bad_client_is_named_with_its_phase(alike, engine):
    """A client whose loss becomes infinite is named, with its phase.

    √(1 − s‖y‖²) is finite at the start, y = 0. Once y has moved, it is not finite at the one client whose s is huge.
    """

    def inner(x, y, batch):
        return alike.problem.inner(x, y, batch) + jnp.mean(jnp.sqrt(1 - batch["s"] * jnp.vdot(y, y)))

    rows = [{**alike.clients.inner.row(i), "s": np.full(alike.clients.inner.size[i], 1e9 * (i == 2))} for i in range(6)]
    clients = fb.Clients(outer=alike.clients.outer, inner=rows)
    with raises_with(fb.errors.NonFiniteError, round=1, during="phase local_updates", client=2):
        fb.solve(
            fixed(fb.SimFBO(local_steps=1)), fb.Bilevel(alike.problem.outer, inner), clients, alike.x0, alike.y0,
            rounds=9, engine=engine,
        )  # fmt: skip


def test_a_loss_or_metric_that_is_not_finite_is_not_masked(task):
    """A loss or metric that is not finite is an error, although iterates stay finite.

    The log of a negative number is NaN, while its gradient is finite.
    """
    outer = lambda x, y, batch: task.problem.outer(x, y, batch) + jnp.log(0.5 - jnp.vdot(y, y))  # noqa: E731
    with raises_with(fb.errors.NonFiniteError, during="phase local_updates") as error:
        fb.solve(ALGORITHM, fb.Bilevel(outer, task.problem.inner), task.clients, task.x0, task.y0 + 0.4, rounds=9)
    assert "outer_loss" in error.value.names
    assert error.value.client in range(len(task.clients))
    with raises_with(fb.errors.NonFiniteError, "odd is nan", round=0, during="evaluation", names=("odd",)):
        run(task, metrics={"odd": lambda x, y: jnp.log(-1.0 + 0 * jnp.sum(x))})


LATER = fixed(fb.SimFBO(local_steps=1, batch_size=None, server_lr=fb.XYV(1e-3, 1e60, 1e-3)))
"""Steps that make y about 1e60 times as large in each round: at the start of round 3, its square is infinite."""


def test_of_a_run_that_diverges_the_state_before_that_round_is_saved(alike, tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "SAVE_SECONDS", 1e9)
    path, good = tmp_path / "run.npz", run(alike, LATER, rounds=3)
    with raises_with(fb.errors.NonFiniteError, round=3, during="phase local_updates", client=0):
        run(alike, LATER, rounds=50, eval_every=2, checkpoint=path)
    assert [row["round"] for row in files.load_meta(path)["history"]] == [0, 2]
    again = run(alike, LATER, rounds=3, checkpoint=path, resume=True)
    assert same_bits(again.state, good.state)
    assert again.ledger == good.ledger


def test_a_round_that_is_saved_again_does_not_push_out_the_one_before(alike, tmp_path):
    """A round that is saved again does not push out the checkpoint before it.

    The run is resumed at round 3, diverges in it, and is saved where it was saved already.
    """
    path = tmp_path / "run.npz"
    run(alike, LATER, rounds=3, checkpoint=path, checkpoint_every=1)
    with raises_with(fb.errors.NonFiniteError, round=3):
        run(alike, LATER, rounds=50, checkpoint=path, checkpoint_every=1, resume=True)
    assert [files.load_meta(file)["ledger"]["rounds"] for file in (files.previous(path), path)] == [2, 3]


def explode():
    raise ValueError("no space for the picture")


def test_a_run_whose_callback_raises_is_saved_first(task, tmp_path, monkeypatch):
    """If a callback raises, the run is saved first, with the row that the callback got.

    The resumed run does not call the callback for this row again.
    """
    monkeypatch.setattr(saver, "SAVE_SECONDS", 1e9)
    path, whole, seen = tmp_path / "run.npz", run(task, rounds=9, eval_every=2), []
    with pytest.raises(ValueError, match="no space for the picture"):
        run(task, rounds=9, eval_every=2, checkpoint=path, callbacks=[at(4, explode)])
    resumed = run(task, rounds=9, eval_every=2, checkpoint=path, resume=True,
                  callbacks=[lambda result, row: seen.append(result.round)])  # fmt: skip
    assert same_run(whole, resumed)
    assert min(seen) > 4


def no_space_later(monkeypatch):
    """Let the first checkpoint be written, and none after it."""
    real, calls = files.save, []

    def save(*arguments, **more):
        calls.append(1)
        if len(calls) > 1:
            raise fb.errors.CheckpointError("could not write: No space left on device")
        real(*arguments, **more)

    monkeypatch.setattr(files, "save", save)
    return calls


def test_an_error_is_not_hidden_by_a_disk_that_is_full_when_it_is_saved(alike, tmp_path, monkeypatch):
    """A full disk hides neither a callback's error nor that of a run that diverges.

    A warning says that the state was not saved.
    """
    monkeypatch.setattr(saver, "SAVE_SECONDS", 1e9)  # otherwise a busy machine could save during the run
    path = tmp_path / "run.npz"
    for changes, error in [
        ({"callbacks": [at(1, explode)]}, ValueError),
        ({"algorithm": LATER}, fb.errors.NonFiniteError),
    ]:
        with monkeypatch.context() as context:
            calls = no_space_later(context)
            with pytest.raises(error), warns_with(fb.errors.CheckpointWarning, "No space", path=path):
                run(alike, **{"rounds": 50, "checkpoint": path, **changes})
            assert len(calls) == 2
        path.unlink()


class Killed(BaseException):
    """End a run as `kill -9` would: nothing more is saved."""


def kill():
    raise Killed


@pytest.mark.parametrize("kill_at", [1, 5])
def test_a_run_that_was_killed_goes_on_from_where_the_clock_had_it_saved(task, tmp_path, monkeypatch, kill_at):
    """A killed run is resumed from the last save that the clock asked for, here after every round.

    There are no rows between the first and the last.
    """
    monkeypatch.setattr(loop, "STRETCH_SECONDS", 0.0)
    monkeypatch.setattr(saver, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(saver, "SAVE_SHARE", np.inf)
    path, whole = tmp_path / "run.npz", run(task, cohort=4)
    with pytest.raises(Killed):
        run(task, cohort=4, checkpoint=path, callbacks=[at(kill_at, kill)])
    assert files.load_meta(path)["ledger"]["rounds"] == kill_at - 1
    resumed = run(task, cohort=4, checkpoint=path, resume=True)
    assert same_run(whole, resumed)


@pytest.mark.parametrize(
    ("seconds", "share", "every", "saved"),
    [(0.0, np.inf, None, [0, 1, 2, 3, 4, 5]), (1e9, 0.1, None, [0, 5]), (0.0, 1e-30, None, [0, 5])]
    + [(seconds, np.inf, 2, [0, 2, 4, 5]) for seconds in (0.0, 1e9)],
)
def test_saves_are_some_seconds_apart_unless_rounds_are_given(
    task, tmp_path, monkeypatch, seconds, share, every, saved
):
    """Saves are some seconds apart, unless a number of rounds is given.

    If a save takes a larger share of the time than is allowed, the next save waits longer.
    """
    rounds = []
    monkeypatch.setattr(saver, "SAVE_SECONDS", seconds)
    monkeypatch.setattr(saver, "SAVE_SHARE", share)
    monkeypatch.setattr(files, "save", lambda path, carry, meta, keep: rounds.append(int(carry.round)))
    run(task, rounds=5, eval_every=1, checkpoint=tmp_path / "run.npz", checkpoint_every=every)
    assert rounds == saved


def test_a_resumed_run_is_saved_soon(task, tmp_path, monkeypatch):
    """A resumed run is saved soon, so that a run that is killed again and again within a second makes progress."""
    run(task, rounds=3, eval_every=1, checkpoint=tmp_path / "run.npz")
    rounds = []
    monkeypatch.setattr(saver, "SAVE_SECONDS", 1e9)
    monkeypatch.setattr(files, "save", lambda path, carry, meta, keep: rounds.append(int(carry.round)))
    run(task, rounds=6, eval_every=1, checkpoint=tmp_path / "run.npz", resume=True)
    assert rounds == [4, 6]


def test_a_damaged_checkpoint_is_not_the_only_one(task, tmp_path):
    """A damaged checkpoint is not the only one: the one before it is read.

    Saves are at rounds 0, 2, 4 and 6. The run's end is at 6 again, which does not push out round 4.
    """
    path = tmp_path / "run.npz"
    before = files.previous(path)
    whole = run(task, rounds=6, eval_every=2, checkpoint=path, checkpoint_every=2)
    path.write_bytes(path.read_bytes()[:1000])
    kept = before.read_bytes()
    with warns_with(fb.errors.CheckpointWarning, f"{before}, round 4", path=path):
        again = run(task, rounds=6, eval_every=2, checkpoint=path, checkpoint_every=2, resume=True)
    assert same_bits(whole.state, again.state)
    assert again.history["round"].tolist() == [0, 2, 4, 6]
    assert before.read_bytes() == kept  # the damaged file has not replaced the one before
    assert run(task, rounds=6, eval_every=2, checkpoint=path, resume=True).round == 6
    path.unlink()
    with refuses("checkpoint", str(path), "resume=True"):
        run(task, rounds=6, checkpoint=path)
    before.unlink()
    before.symlink_to(os.devnull)
    with raises_with(fb.errors.CheckpointError, "pipe or a device", path=path, errno=errno.ENOENT):
        run(task, rounds=6, checkpoint=path, resume=True)
    before.unlink()
    before.write_bytes(b"")
    with raises_with(fb.errors.CheckpointError, str(before), path=path, errno=errno.ENOENT):
        run(task, rounds=6, checkpoint=path, resume=True)


class Handled(Exception):
    """Raised by a program's own handler of SIGTERM."""


def end_it(number, frame):
    raise Handled


@pytest.mark.parametrize(
    ("number", "handler", "ends"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, signal.SIG_DFL, SystemExit),
        (signal.SIGTERM, end_it, Handled),
        (signal.SIGTERM, lambda *_: None, KeyboardInterrupt),
    ],
)
def test_a_signal_is_obeyed_after_saving_and_resuming_ends_with_the_same_bits(number, handler, ends, task, tmp_path):
    path = tmp_path / "run.npz"
    whole = run(task, rounds=9, eval_every=4)
    press = at(4, lambda: os.kill(os.getpid(), number))
    said = f"saved after round [48] of 9 to {path}; .* with resume=True continues"
    warns = pytest.warns(fb.errors.CheckpointWarning, match=said) if ends is SystemExit else contextlib.nullcontext()
    before = signal.signal(number, handler)
    try:
        with warns, pytest.raises(ends, match=said if ends is KeyboardInterrupt else None) as caught:
            run(task, rounds=9, eval_every=4, checkpoint=path, checkpoint_every=100, callbacks=[press])
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert ends is not SystemExit or caught.value.code == 128 + 15
    resumed = run(task, rounds=9, eval_every=4, checkpoint=path, resume=True)
    assert same_run(whole, resumed)


def test_a_signal_that_a_program_ignores_does_not_end_a_run(task):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run(task, callbacks=[at(0, lambda: os.kill(os.getpid(), signal.SIGTERM))]).round == 7
    finally:
        signal.signal(signal.SIGTERM, before)


def rewritten(path, **header):
    """Change entries in the header of a checkpoint; None removes an entry."""
    with np.load(path) as stored:
        arrays = dict(stored)
    found = json.loads(arrays["__meta__"].tobytes())
    versions = found["meta"]["fingerprint"]["versions"].partition(", ")[2]
    before = f"fedbilevel {header['fedbilevel']}, " if header["fedbilevel"] else ""
    found["meta"]["fingerprint"]["versions"] = before + versions
    found = {name: one for name, one in {**found, **header}.items() if one is not None}
    np.savez(path, **{**arrays, "__meta__": np.frombuffer(json.dumps(found).encode(), np.uint8)})


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            {"fedbilevel": "0.1.0"},
            "was written by fedbilevel 0.1.0, jax .*, and is continued by fedbilevel .*may diff",
        ),
        ({"fedbilevel": None, "format": None}, r"was written by jax .*, and is continued by fedbilevel \S+, jax"),
    ],
)
def test_a_run_does_not_go_on_under_another_version_in_silence(header, said, task, tmp_path):
    path = tmp_path / "run.npz"
    whole = run(task, rounds=6, checkpoint=path)
    rewritten(path, **header)
    with pytest.warns(fb.errors.CheckpointWarning, match=said):
        assert same_bits(run(task, rounds=6, checkpoint=path, resume=True).state, whole.state)


def test_a_checkpoint_of_a_later_format_says_which_version_reads_it(task, tmp_path):
    path = tmp_path / "run.npz"
    run(task, rounds=6, checkpoint=path)
    rewritten(path, fedbilevel="9.1\x1b[2J", format=files.FORMAT + 1)
    files.previous(path).unlink()  # otherwise a run would continue from it
    with raises_with(fb.errors.CheckpointError, "fedbilevel 9.1�[2J", path=path, errno=None) as caught:
        run(task, rounds=6, checkpoint=path, resume=True)
    assert f"fedbilevel {fb.__version__} does not read" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_checkpoint_of_an_earlier_format_goes_on_where_its_state_is_the_same(task, tmp_path):
    """A checkpoint of an earlier format is continued if its state is the same.

    If not, it is refused, and the error names version and format.
    """
    path = tmp_path / "run.npz"
    whole = run(task, rounds=6, checkpoint=path)
    rewritten(path, fedbilevel="0.2.0", format=files.FORMAT - 1)
    assert same_bits(run(task, rounds=6, checkpoint=path, resume=True).state, whole.state)
    files.previous(path).unlink(missing_ok=True)
    rewritten(path, fedbilevel="0.2.0", format=files.FORMAT - 1)
    said = f"fedbilevel 0.2.0 in format {files.FORMAT - 1}, but runs need format {files.FORMAT}"
    with raises_with(fb.errors.CheckpointError, said, path=path) as caught:
        files.load(path, {"another": jnp.zeros(())})
    assert "['another']" in caught.value.differences


def test_a_checkpoint_of_another_run_is_refused_and_stays(task, tmp_path):
    path = tmp_path / "run.npz"
    run(task, checkpoint=path)
    before = path.read_bytes()
    other = fixed(fb.SimFBO(local_steps=2, batch_size=4, client_lr=0.5))

    def differs(**differences):
        return raises_with(fb.errors.CheckpointError, path=path, differences=differences, remedy=saver.FORCE)

    for options, expected in [
        ({"resume": False}, refuses("checkpoint", str(path), "resume=True")),
        ({"key": 9}, differs(key=([0, 0], [0, 9]))),
        ({"cohort": 2}, differs(cohort=(6, 2))),
        (
            {"algorithm": other},
            differs(**{"client_lr.x": (0.01, 0.5), "client_lr.y": (0.1, 0.5), "client_lr.v": (0.1, 0.5)}),
        ),
        ({"rounds": 3}, refuses("rounds", 3, "at least 7")),
    ]:
        with expected:
            run(task, **{"checkpoint": path, "resume": True} | options)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_streaming_under_a_scoped_float64_setting(task):
    """With streaming, the float64 setting of the caller's thread also holds in the thread that reads ahead."""
    with jax.enable_x64(False):
        start = (jnp.zeros(5, jnp.float32), jnp.zeros(8, jnp.float32))
        given, options = (ALGORITHM, task.problem, task.clients, *start), {"rounds": 2, "cohort": 3}
        single = [fb.solve(*given, **options, engine=fb.Local(stream=flag)).state for flag in (False, True)]
    assert {leaf.dtype for leaf in jax.tree.leaves(single)} == {jnp.dtype("float32")}
    assert same_bits(*single)
