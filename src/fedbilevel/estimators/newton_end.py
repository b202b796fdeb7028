"""Decide when Newton's method ends, in `penalty_search` and in `wide_search`."""

from jax import Array

SHORTEST = 2.0**-20  # the shortest step that is tried, as a share of Newton's step
# Shares of the first ‖∇G‖. Below EXACT, ‖∇G‖ is small enough to stop. Below ROUNDED, rounding errors may matter.
EXACT, ROUNDED = 1e-14, 1e-9


def exact(norm: Array, first: Array) -> Array:
    """Return whether ‖∇G‖ is small enough to stop, compared with the first ‖∇G‖."""
    return norm <= EXACT * first


def ended(norm: Array, first: Array, length: Array) -> Array:
    """Return whether Newton's method should end, because no further step is worth an exchange.

    Args:
        norm: ‖∇G‖ at the best models so far, a scalar.
        first: ‖∇G‖ at the start.
        length: the length of the next step, as a share of Newton's step. If it is below 1, the last step did not make
            ‖∇G‖ smaller.
    """
    rounded = (norm <= ROUNDED * first) & (length < 1)  # only rounding errors are left: the last step did not help
    return exact(norm, first) | rounded | (length < SHORTEST)
