"""Resume a run from its checkpoint.

The run continues at the saved round. If it diverged, and `resume` is "force", it begins anew at x and y of its best
row: the row of the history with the best value of the column that `best_by` of `solve` names, by default the outer
loss.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedbilevel.core.errors import CheckpointError, CheckpointWarning, require
from fedbilevel.core.tree import split
from fedbilevel.engines import checkpoint as files
from fedbilevel.engines.engine import Carry
from fedbilevel.engines.loop import Loop
from fedbilevel.engines.process_group import warn_on_first
from fedbilevel.engines.saver import START_ANEW


def take_up(loop: Loop, like: Carry, force: bool) -> Carry:
    """Restore a run from its checkpoint, and return the carry from which it continues.

    Args:
        loop: the run, at its beginning.
        like: the run's first carry, which gives structure and shapes.
        force: whether to accept the checkpoint of another run, or of a run that diverged.

    Raises:
        CheckpointError: the checkpoint cannot be read, or belongs to another run.
        ConfigurationError: the checkpoint has more rounds than are asked for.
    """
    carry, meta, file = loop.saver.load(like, force, anew=loop.execution.posed.simulated)
    with files.as_checkpoint_error(file):
        loop.measurements.continue_from(meta, carry.best)
        loop.rescue.continue_from(meta)
        loop.execution.devices = int(meta.get("devices", 1) or 0) or None
    carry = carry._replace(best=None)
    if carry.state is None:  # only the best row was read
        carry = begin_anew(loop, carry)
    loop.execution.halve(loop.rescue.halvings)
    done, rounds = int(carry.round), loop.plan.rounds
    loop.saver.continue_from(file, done)
    require(done <= rounds, "rounds", rounds, f"at least {done}, which the checkpoint has done")
    return carry


def begin_anew(loop: Loop, carry: Carry) -> Carry:
    """Start the method anew, at x and y of the row with the best value of `best_by`.

    The state of a run that diverged cannot be continued.
    """
    best = loop.measurements.best
    assert best is not None
    if loop.execution.privacy is not None:
        text = f"the run in {loop.saver.path} diverged, and the privacy spent at its best row was not recorded"
        raise CheckpointError(text, path=loop.saver.path, remedy=START_ANEW)
    text = f"the run diverged: it continues from x and y of its best row, of round {best.round}"
    warn_on_first(CheckpointWarning(text, path=loop.saver.path))
    loop.rescue.gave_up = ""
    if best.round < int(carry.round):
        loop.measurements.forget_after(best.round)
    first = loop.execution.first_carry(split(best.x)[0], split(best.y)[0])
    return first._replace(round=jnp.full_like(carry.round, best.round), now=carry.now)
