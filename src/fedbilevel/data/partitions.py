"""Who holds which samples: partitions of a labelled set, as an index array for each client.

All partitions use every sample exactly once, shuffle the order within each client, and draw only from `seed`: an int
(the same seed gives the same partition) or a NumPy Generator (which is advanced).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbilevel.data.reading import DataError, unknown_name

Indices = NDArray[np.int64]
Seed = int | np.random.Generator

ATTEMPTS = 1000  # redraws of a random partition before its `minimum` counts as impossible


def iid(labels: ArrayLike, clients: int, *, seed: Seed) -> list[Indices]:
    """Deal out samples at random, client sizes equal to within 1."""
    y, rng = _checked(labels, clients), generator(seed, 1)
    return np.array_split(rng.permutation(len(y)), clients)


def shards(labels: ArrayLike, clients: int, *, per_client: int = 2, seed: Seed) -> list[Indices]:
    """Cut samples, sorted by label, into shards; each client gets `per_client` of them at random.

    There are clients * per_client shards, of equal size to within 1 (equal if the numbers divide, as in the paper's
    200 shards of 300), so that no sample is left out. Source: McMahan et al., Communication-Efficient
    Learning of Deep Networks from Decentralized Data, AISTATS 2017, section 3 ("pathological non-IID").
    """
    y, rng = _checked(labels, clients), generator(seed, 2)
    if not _is_whole(per_client) or per_client < 1 or clients * per_client > len(y):
        raise DataError(
            f"per_client is {per_client!r}; allowed: a whole number from 1 to {len(y) // clients} for {clients} "
            f"clients and {len(y)} samples, so that no shard is empty."
        )
    cut = np.array_split(np.argsort(y, kind="stable"), clients * per_client)
    owner = rng.permutation(clients * per_client).reshape(clients, per_client)
    return [rng.permutation(np.concatenate([cut[shard] for shard in row])) for row in owner]


def dirichlet(labels: ArrayLike, clients: int, *, alpha: float, minimum: int = 1, seed: Seed) -> list[Indices]:
    """Skew labels: for each class, draw the clients' shares of it from a symmetric Dirichlet(alpha).

    A share has mean 1/K and variance (1/K)(1 - 1/K) / (K alpha + 1) for K clients: small alpha gives few
    classes per client, alpha to infinity gives iid. No self-balancing. minimum: samples per client; a draw
    that misses it is dropped as a whole (up to 1,000 times), which conditions the law on it; `minimum=0` is
    the plain definition and can leave a client empty. Source: Yurochkin et al., Bayesian Nonparametric
    Federated Learning of Neural Networks, ICML 2019, section 4 (also Li et al., Federated Learning on Non-IID
    Data Silos, ICDE 2022).
    """
    y, rng = _checked(labels, clients), generator(seed, 3)
    classes = [np.flatnonzero(y == label) for label in np.unique(y)]
    totals = np.array([len(members) for members in classes])
    counts = _drawn(rng, totals, clients, alpha, minimum)
    held: list[list[Indices]] = [[] for _ in range(clients)]
    for members, per_client in zip(classes, counts, strict=True):
        for own, part in zip(held, _dealt(rng, members, per_client), strict=True):
            own.append(part)
    return [rng.permutation(np.concatenate(own)) for own in held]


def quantity(labels: ArrayLike, clients: int, *, alpha: float, minimum: int = 1, seed: Seed) -> list[Indices]:
    """Skew quantities: client sizes in proportion to a draw from Dirichlet(alpha), labels at random.

    minimum: samples per client, as in `dirichlet`. Source: Li et al., Federated Learning on Non-IID Data
    Silos: An Experimental Study, ICDE 2022, section 3.
    """
    y, rng = _checked(labels, clients), generator(seed, 4)
    (sizes,) = _drawn(rng, np.array([len(y)]), clients, alpha, minimum)
    return _dealt(rng, np.arange(len(y)), sizes)


def one_label(labels: ArrayLike, clients: int, *, seed: Seed) -> list[Indices]:
    """Give each client a single label: client k holds label number k mod C of the C labels in ascending order.

    The clients of a label share its samples equally, to within 1. DataError with fewer clients than labels,
    or more clients to a label than it has samples. Source: the one-class-per-client limit of McMahan et al.,
    AISTATS 2017.
    """
    y, rng = _checked(labels, clients), generator(seed, 5)
    kinds, counts = np.unique(y, return_counts=True)
    if clients < len(kinds):
        raise DataError(
            f"clients is {clients}; allowed: at least one per label, {len(kinds)}, or samples are left out."
        )
    held: list[Indices] = [np.empty(0, np.int64)] * clients
    for number, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        owners = range(number, clients, len(kinds))
        if len(owners) > count:
            raise DataError(f"clients is {clients}: {len(owners)} of them share the {count} samples of label {kind}.")
        parts = np.array_split(rng.permutation(np.flatnonzero(y == kind)), len(owners))
        for client, part in zip(owners, parts, strict=True):
            held[client] = part
    return held


PARTITIONS: dict[str, Callable[..., list[Indices]]] = {
    "dirichlet": dirichlet,
    "iid": iid,
    "one_label": one_label,
    "quantity": quantity,
    "shards": shards,
}
REQUIRED = {"alpha": ("a number above 0, up to 1e9 (the smaller, the more do clients differ)", 0.5)}
"""Options without a default: the values that are allowed, and an example."""


def partition(name: str, labels: ArrayLike, clients: int, *, seed: Seed, **options: Any) -> list[Indices]:
    """Draw the partition called `name`, a key of `PARTITIONS`, with its own options.

    labels: (n,) integers. Returns an index array for each client. DataError for an unknown name or option, or a
    value that the partition cannot honour.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    parameters = inspect.signature(PARTITIONS[name]).parameters
    allowed = [key for key in parameters if key not in ("labels", "clients", "seed")]
    for key in options:
        if key not in allowed:
            raise unknown_name(f"option of partition {name!r}", key, allowed)
    for key in allowed:
        if parameters[key].default is inspect.Parameter.empty and key not in options:
            allowed_values, example = REQUIRED[key]
            raise DataError(
                f"partition {name!r} needs the option {key!r}, {allowed_values}: {key}={example}; in a spec "
                f"partition_options = {{{key} = {example}}}, in a shell --set 'partition_options={{{key}={example}}}'."
            )
    return PARTITIONS[name](labels, clients, seed=seed, **options)


def split(
    parts: Sequence[NDArray[np.integer]], fraction: float = 0.5, *, seed: Seed
) -> tuple[list[Indices], list[Indices]]:
    """Split each client's samples at random into (training, validation), e.g. for the inner and the outer loss.

    fraction: the share of training samples, strictly between 0 and 1, rounded to whole samples and kept away
    from none and all, so that both sides are non-empty. DataError naming a client that holds fewer than two
    samples.
    """
    if not 0 < fraction < 1:
        raise DataError(f"fraction is {fraction}; allowed: strictly between 0 and 1.")
    rng = generator(seed, 6)
    training, validation = [], []
    for client, part in enumerate(parts):
        if len(part) < 2:
            raise DataError(f"client {client} holds {len(part)} samples; a split needs at least 2.")
        mixed = rng.permutation(np.asarray(part, np.int64))
        cut = min(max(round(fraction * len(part)), 1), len(part) - 1)
        training.append(mixed[:cut])
        validation.append(mixed[cut:])
    return training, validation


def _drawn(
    rng: np.random.Generator, totals: NDArray[np.integer], clients: int, alpha: float, minimum: int
) -> NDArray[np.int64]:
    """Draw counts (groups, clients) with row sums `totals`, each row in proportion to a Dirichlet(alpha) draw."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 < alpha <= 1e9:
        raise DataError(f"alpha is {alpha!r}; allowed: a number above 0, up to 1e9.")
    if not _is_whole(minimum) or not 0 <= minimum <= totals.sum() // clients:
        raise DataError(
            f"minimum is {minimum!r}; allowed: a whole number from 0 to {totals.sum() // clients}, as {totals.sum()} "
            f"samples go to {clients} clients."
        )
    for _ in range(ATTEMPTS):
        edges = np.cumsum(rng.dirichlet(np.full(clients, alpha), size=len(totals)), axis=1)
        # Rounded, not cut down: no client is favoured, and the last edge is the total whatever the sum's rounding.
        cuts = np.rint(edges * totals[:, None]).astype(np.int64)
        counts: NDArray[np.int64] = np.diff(cuts, axis=1, prepend=np.int64(0))
        if counts.sum(axis=0).min() >= minimum:
            return counts
    raise DataError(
        f"alpha = {alpha} over {clients} clients left a client with fewer than minimum = {minimum} samples "
        f"in each of {ATTEMPTS} draws; allowed: a larger alpha, fewer clients or a smaller minimum."
    )


def _dealt(rng: np.random.Generator, members: Indices, counts: NDArray[np.int64]) -> list[Indices]:
    return np.split(rng.permutation(members), np.cumsum(counts)[:-1])


def _checked(labels: ArrayLike, clients: int) -> NDArray[np.integer]:
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels have shape {y.shape} and type {y.dtype}; allowed: integers along a single axis.")
    if not 1 <= clients <= len(y):
        raise DataError(f"clients is {clients}; allowed: 1 to {len(y)}, the number of samples.")
    return y


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def generator(seed: Seed, stream: int) -> np.random.Generator:
    """Return a Generator for a purpose: the same int gives unrelated numbers to a partition and the split after it."""
    if isinstance(seed, np.random.Generator):
        return seed
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise DataError(f"seed is {seed!r}; allowed: an int from 0 on, or a numpy.random.Generator.")
    return np.random.default_rng([stream, int(seed)])
