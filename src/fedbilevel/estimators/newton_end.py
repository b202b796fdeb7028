"""Decide when Newton's method ends, in `penalty_search` and in `wide_search`."""

from jax import Array

SHORTEST = 2.0**-20  # step, as a share of Newton's
EXACT, ROUNDED = 1e-14, 1e-9  # ‖∇G‖ in units of the first: small enough; and small enough for rounding errors to count


def exact(norm: Array, first: Array) -> Array:
    """Decide whether ‖∇G‖ is small enough, compared with the first."""
    return norm <= EXACT * first


def ended(norm: Array, first: Array, length: Array) -> Array:
    """Decide whether no further step is worth an exchange.

    Args:
        norm: ‖∇G‖ at the best models so far.
        first: the same at the start.
        length: the length of the step that is tried next, as a share of Newton's. If it is below 1, the last step did
            not make ‖∇G‖ smaller.
    """
    rounded = (norm <= ROUNDED * first) & (length < 1)  # the last step was no larger than rounding errors
    return exact(norm, first) | rounded | (length < SHORTEST)
