"""The names of Flower's messages that are used without Flower promising them; see `launch.private`, too."""

from __future__ import annotations

from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.task_identity import TaskIdentity

BACKOFF = 0.02  # seconds before an object that is still being uploaded is asked for again, first time
LONGEST_PULL = 7200.0  # seconds that one message's objects are waited for at most; Flower's own figure


def be_server() -> None:
    """Let this process make messages as a ServerApp does, which Flower tells who it is."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0


def quick_pulls(longest: float) -> None:
    """Ask for an object that is still on its way again after 0.02 s, then twice that, … (Flower: 1 s), and give up the
    message whose objects have not come within `longest` seconds (Flower: 2 h, which stays the most): it holds everyone
    who waits. This is from now on, for all of this process."""
    defaults = inflatable_utils.pull_objects.__kwdefaults__
    assert defaults is not None
    defaults |= {"initial_backoff": BACKOFF, "max_time": min(longest, LONGEST_PULL)}
