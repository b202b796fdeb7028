"""The peer: FedNest and LFedNest as a serial PyTorch loop, one client after the other, with autograd.

It stands alone (torch and numpy only), so that a benchmark can run it in a subprocess under another
interpreter, on the same start, data and batch indices as the engine, and compare numbers and time:

    python peer_torch_fednest.py problem.npz result.npz [--threads N] [--repeats K] [--ahead]
    python peer_torch_fednest.py --check            against an epoch written out in NumPy, without autograd

Task: hyper-representation. x = first layer (w, b), y = head (w, b) of an MLP; inner loss g = cross-entropy on
training samples + ridge * |y|^2; outer loss f = cross-entropy on validation samples; equal weights. One epoch of

    FedNest     q = mean of the clients' dg/dy; each client makes tau steps
                y_i <- y_i - beta/tau * (dg/dy(y_i) - dg/dy(y) + q), the same batch in both; y <- mean y_i;
                p = N * eta * mean df/dy; N' times p <- p - eta * mean (d2g/dyy p);
                h = mean (df/dx - d2g/dxy p); x <- x - alpha * h
    LFedNest    each client makes tau steps y_i <- y_i - beta/tau * dg/dy(y_i); y <- mean y_i;
                each client finds p and h as above by itself, f on one batch for both; x <- x - alpha * mean h

with one inner round and one outer step, along h itself; the first corrected step goes along q, its correction being 0.
Nothing needless is computed: a batch's hidden units are made once, for both gradients of a pair, and only h runs back
into x. Autograd takes 0.6 of the time of torch.func here, for gradients as for products. With --ahead, which is for
networks cut in two alone, x being fixed until the end of the epoch, each client's hidden units are made once an epoch
for all its training samples, and the steps on y and the products with d2g/dyy draw from them.

For M clients, S samples each of D numbers, R epochs, P clients an epoch and batches of B, the arrays of `problem.npz`
are

    x_w (D, H), x_b (H,), y_w (H, C), y_b (C,)                            start
    inner_images, outer_images (M, S, D); inner_labels, outer_labels (M, S)
    cohorts (R, P)                                                        clients
    anchor_batches (R, P, B)                                              for q; FedNest alone
    inner_batches (R, P, tau, B), FedNest (R, P, tau - 1, B)              for the inner steps, the corrected ones
    start_batches (R, P, B), of outer samples                             for df/dy; FedNest alone
    lengths (R, P); product_batches (R, P, N - 1, B)                      N', the same for all clients in FedNest
    hyper_outer_batches, hyper_inner_batches (R, P, B)                    for h
    inner_lr, outer_lr, neumann_step, neumann_terms, ridge, checked ()    beta, alpha, eta, N; see below

The first `checked` epochs run once, for where they end; the remaining ones go on from there, timed, `repeats` times.
`result.npz` holds x_w ... y_b after the checked epochs, seconds_per_round (K,), torch_version, threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Layer = tuple[Tensor, ...]  # (w, b)
Batch = tuple[Tensor, Tensor]  # images, labels
Draws = dict[str, Tensor]


@dataclass
class Peer:
    """The data and the step sizes; methods compute one client's part or one epoch."""

    inner: Batch
    outer: Batch
    inner_lr: float
    outer_lr: float
    neumann_step: float
    neumann_terms: int
    ridge: float
    ahead: bool = False

    def inner_units(self, x: Layer, clients: list[int]) -> list[Callable[[Tensor], Batch]]:
        """For each client: indices -> (hidden units, labels) of training samples, for derivatives in y alone."""

        def of_batch(client: int, index: Tensor) -> Batch:
            images, labels = self.inner_batch(client, index)
            return frozen(x, images), labels

        def chosen(hidden: Tensor, labels: Tensor, index: Tensor) -> Batch:
            return hidden[index], labels[index]

        if not self.ahead:
            return [partial(of_batch, client) for client in clients]
        return [partial(chosen, frozen(x, self.inner[0][client]), self.inner[1][client]) for client in clients]

    def inner_batch(self, client: int, index: Tensor) -> Batch:
        return self.inner[0][client][index], self.inner[1][client][index]

    def outer_batch(self, client: int, index: Tensor) -> Batch:
        return self.outer[0][client][index], self.outer[1][client][index]

    def first_power(self, outer_gradient: Layer) -> Layer:
        """N * eta * df/dy."""
        return tuple(self.neumann_terms * self.neumann_step * t for t in outer_gradient)

    def product(self, y: Layer, p: Layer, hidden: Tensor, labels: Tensor) -> Layer:
        """d2g/dyy p."""
        y = leaves(y)
        first = gradient(y, hidden, labels, twice=True)
        return added(torch.autograd.grad(first, y, p), p, 2 * self.ridge)

    def hypergradient(self, loss: Tensor, x: Layer, y: Layer, p: Layer, batch: Batch) -> Layer:
        """df/dx - d2g/dxy p, by one reverse pass over f - <dg/dy, p>. (The ridge has no mixed derivative.)"""
        first = gradient(y, units(x, batch[0]), batch[1], twice=True)
        pairing = sum((d * part).sum() for d, part in zip(first, p, strict=True))
        return torch.autograd.grad(loss - pairing, x)

    def plain_steps(self, y: Layer, batches: list[Batch]) -> Layer:
        """One step for each batch."""
        step = self.inner_lr / len(batches)
        for hidden, labels in batches:
            y = leaves(y)
            y = added(y, added(gradient(y, hidden, labels), y, 2 * self.ridge), -step)
        return y

    def corrected_steps(self, y: Layer, q: Layer, batches: list[Batch]) -> Layer:
        """The step along q and one for each batch."""
        step, start = self.inner_lr / (len(batches) + 1), leaves(y)
        y = added(y, q, -step)
        for hidden, labels in batches:
            y = leaves(y)
            difference = cross_entropy(y, hidden, labels) - cross_entropy(start, hidden, labels)
            both = torch.autograd.grad(difference, y + start)
            change = added(added(both[:2], both[2:], 1), added(y, start, -1), 2 * self.ridge)
            y = added(y, added(change, q, 1), -step)
        return y

    def fednest(self, x: Layer, y: Layer, draws: Draws) -> tuple[Layer, Layer]:
        """One epoch."""
        clients = draws["cohorts"].tolist()
        inner = self.inner_units(x, clients)
        q = mean([gradient(leaves(y), *of(index)) for of, index in zip(inner, draws["anchor_batches"], strict=True)])
        q = added(q, y, 2 * self.ridge)
        ends = []
        for of, batches in zip(inner, draws["inner_batches"], strict=True):
            ends.append(self.corrected_steps(y, q, [of(index) for index in batches]))
        y = mean(ends)
        starts = []
        for client, index in zip(clients, draws["start_batches"], strict=True):
            images, labels = self.outer_batch(client, index)
            starts.append(gradient(leaves(y), frozen(x, images), labels))
        p = self.first_power(mean(starts))
        for n in range(int(draws["lengths"][0])):
            indices = draws["product_batches"][:, n]
            products = [self.product(y, p, *of(index)) for of, index in zip(inner, indices, strict=True)]
            p = added(p, mean(products), -self.neumann_step)
        replies = []
        for i, client in enumerate(clients):
            here, head = leaves(x), leaves(y)
            images, labels = self.outer_batch(client, draws["hyper_outer_batches"][i])
            loss = cross_entropy(head, units(here, images), labels)
            batch = self.inner_batch(client, draws["hyper_inner_batches"][i])
            replies.append(self.hypergradient(loss, here, head, p, batch))
        return added(x, mean(replies), -self.outer_lr), y

    def lfednest(self, x: Layer, y: Layer, draws: Draws) -> tuple[Layer, Layer]:
        """One epoch."""
        clients = draws["cohorts"].tolist()
        inner = self.inner_units(x, clients)
        ends = []
        for of, batches in zip(inner, draws["inner_batches"], strict=True):
            ends.append(self.plain_steps(y, [of(index) for index in batches]))
        y = mean(ends)
        replies = []
        for i, client in enumerate(clients):
            here, head = leaves(x), leaves(y)
            images, labels = self.outer_batch(client, draws["hyper_outer_batches"][i])
            loss = cross_entropy(head, units(here, images), labels)
            p = self.first_power(torch.autograd.grad(loss, head, retain_graph=True))
            for index in draws["product_batches"][i, : int(draws["lengths"][i])]:
                p = added(p, self.product(head, p, *inner[i](index)), -self.neumann_step)
            batch = self.inner_batch(client, draws["hyper_inner_batches"][i])
            replies.append(self.hypergradient(loss, here, head, p, batch))
        return added(x, mean(replies), -self.outer_lr), y


def units(x: Layer, images: Tensor) -> Tensor:
    """The hidden units."""
    return F.relu(torch.addmm(x[1], images, x[0]))


def frozen(x: Layer, images: Tensor) -> Tensor:
    """The hidden units, for derivatives in y alone."""
    with torch.no_grad():
        return units(x, images)


def cross_entropy(y: Layer, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(torch.addmm(y[1], hidden, y[0]), labels)


def gradient(y: Layer, hidden: Tensor, labels: Tensor, twice: bool = False) -> Layer:
    """Of the cross-entropy, in y; `twice`: it will be differentiated again."""
    return torch.autograd.grad(cross_entropy(y, hidden, labels), y, create_graph=twice)


def leaves(layer: Layer) -> Layer:
    return tuple(t.detach().requires_grad_() for t in layer)


def detached(layer: Layer) -> Layer:
    return tuple(t.detach() for t in layer)


def added(layer: Layer, other: Layer, factor: float) -> Layer:
    return tuple(torch.add(a.detach(), b.detach(), alpha=factor) for a, b in zip(layer, other, strict=True))


def mean(layers: list[Layer]) -> Layer:
    return tuple(sum(parts[1:], start=parts[0]) / len(parts) for parts in zip(*layers, strict=True))


def epochs(peer: Peer, x: Layer, y: Layer, draws: Draws) -> tuple[Layer, Layer]:
    """As many as there are draws for; FedNest if they hold any for q."""
    epoch = peer.fednest if "anchor_batches" in draws else peer.lfednest
    for r in range(len(draws["cohorts"])):
        x, y = epoch(x, y, {name: index[r] for name, index in draws.items()})
    return x, y


NUMBERS = ("inner_lr", "outer_lr", "neumann_step", "neumann_terms", "ridge")
DRAWS = (
    *("cohorts", "lengths", "anchor_batches", "inner_batches", "start_batches"),
    *("product_batches", "hyper_outer_batches", "hyper_inner_batches"),
)


def setup(arrays: dict[str, np.ndarray], ahead: bool) -> tuple[Peer, Layer, Layer, Draws]:
    """What `epochs` wants, from the arrays of a problem."""
    tensors = {k: torch.from_numpy(a) for k, a in arrays.items()}
    data = [(tensors[f"{s}_images"], tensors[f"{s}_labels"].long()) for s in ("inner", "outer")]
    x, y = ((tensors[f"{v}_w"], tensors[f"{v}_b"]) for v in "xy")
    draws = {k: tensors[k].long() for k in DRAWS if k in tensors}
    return Peer(*data, *(arrays[k].item() for k in NUMBERS), ahead), x, y, draws


def main() -> None:
    """Read a problem, run it, write where it ends and the seconds per epoch of each repeat; or check the peer."""
    parser = argparse.ArgumentParser(description="FedNest and LFedNest as a serial PyTorch loop")
    parser.add_argument("problem", type=Path, nargs="?")
    parser.add_argument("result", type=Path, nargs="?")
    parser.add_argument("--threads", type=int, help="PyTorch's own default if not given")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ahead", action="store_true", help="hidden units of all samples, once an epoch")
    parser.add_argument("--check", action="store_true", help="compare with NumPy instead, in float64")
    options = parser.parse_args()
    if options.check:
        check()
        return
    if not options.result:
        parser.error("give a problem and a result, or --check")
    if options.threads:
        torch.set_num_threads(options.threads)
    with np.load(options.problem) as problem:
        arrays = dict(problem)
    peer, x, y, draws = setup(arrays, options.ahead)
    checked = int(arrays["checked"])
    end = epochs(peer, x, y, {k: a[:checked] for k, a in draws.items()})  # first-call costs are not the loop's
    timed, seconds = {k: a[checked:] for k, a in draws.items()}, []
    for _ in range(options.repeats):
        begin = time.perf_counter()
        epochs(peer, *end, timed)
        seconds.append((time.perf_counter() - begin) / len(timed["cohorts"]))
    np.savez(
        options.result,
        **{f"{v}_{k}": t.numpy() for v, layer in zip("xy", end, strict=True) for k, t in zip("wb", layer, strict=True)},
        seconds_per_round=np.array(seconds),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
    )


def check() -> None:
    """Two epochs of a small problem with clients that differ, every correction computed, against `WrittenOut`."""
    rng = np.random.default_rng(0)
    clients, samples, rounds, cohort, batch, tau, terms = 5, 12, 2, 3, 6, 4, 4
    sizes = {"x_w": (7, 6), "x_b": (6,), "y_w": (6, 3), "y_b": (3,)}
    problem = {k: rng.normal(size=size) for k, size in sizes.items()}
    for name in ("inner", "outer"):
        problem[f"{name}_images"] = rng.normal(size=(clients, samples, 7)) + rng.normal(size=(clients, 1, 7))
        problem[f"{name}_labels"] = rng.integers(0, 3, size=(clients, samples))
    problem |= {k: np.array(v) for k, v in zip(NUMBERS, (0.3, 0.2, 0.1, terms, 0.05), strict=True)}
    draw = {k: rng.integers(0, samples, size=(rounds, cohort, batch)) for k in DRAWS if k.endswith("_batches")}
    draw["inner_batches"] = rng.integers(0, samples, size=(rounds, cohort, tau - 1, batch))
    draw["product_batches"] = rng.integers(0, samples, size=(rounds, cohort, terms - 1, batch))
    draw["cohorts"] = np.array([rng.permutation(clients)[:cohort] for _ in range(rounds)])
    draw["lengths"] = np.array([[3, 3, 3], [1, 1, 1]])
    local = {k: v for k, v in draw.items() if k not in ("anchor_batches", "start_batches")}
    local["lengths"] = np.array([[0, 3, 2], [1, 0, 3]])
    for name, draws in (("FedNest", draw), ("LFedNest", local)):
        expected = WrittenOut(problem).epochs(draws)
        moved = np.linalg.norm(expected - np.concatenate([problem[k].ravel() for k in sizes]))
        for ahead in (False, True):
            found = epochs(*setup(problem | draws, ahead))
            gap = np.abs(np.concatenate([t.numpy().ravel() for layer in found for t in layer]) - expected).max()
            print(f"{name}, ahead={ahead}: moved by {moved:.2f}, largest difference from NumPy {gap:.1e}")
            if not gap < 1e-12:
                raise SystemExit(f"{name} disagrees with the epoch written out in NumPy")


class WrittenOut:
    """The same epochs from the formulas of the derivatives; x and y are flat, every line of the algorithm computed.

    For a batch with hidden units h (rows), probabilities s and residuals r = (s - onehot)/B: dCE/dW = hT r,
    dCE/db = sum r. In direction (V, c), with e = h V + c and J e = (s * e - s <s, e>)/B row by row,
    d2CE/dyy (V, c) = (hT J e, sum J e), and <dCE/dy, (V, c)> = sum r * e has dh = r VT + J e WT.
    """

    def __init__(self, problem: dict[str, np.ndarray]) -> None:
        self.problem = problem
        self.hidden, self.classes = problem["y_w"].shape

    def head(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return y[: -self.classes].reshape(self.hidden, self.classes), y[-self.classes :]

    def layers(self, x: np.ndarray, y: np.ndarray, name: str, client: int, index: np.ndarray) -> tuple:
        images, labels = (self.problem[f"{name}_{k}"][client][index] for k in ("images", "labels"))
        before = images @ x[: -self.hidden].reshape(-1, self.hidden) + x[-self.hidden :]
        h, (w, b) = np.maximum(before, 0), self.head(y)
        s = np.exp(h @ w + b)
        s /= s.sum(1, keepdims=True)
        return images, before > 0, h, s, (s - np.eye(self.classes)[labels]) / len(labels)

    def in_y(self, x: np.ndarray, y: np.ndarray, name: str, client: int, index: np.ndarray) -> np.ndarray:
        _, _, h, _, r = self.layers(x, y, name, client, index)
        ridge = 2 * self.problem["ridge"] * y if name == "inner" else 0
        return np.concatenate([(h.T @ r).ravel(), r.sum(0)]) + ridge

    def product(self, x: np.ndarray, y: np.ndarray, p: np.ndarray, client: int, index: np.ndarray) -> np.ndarray:
        _, _, h, s, _ = self.layers(x, y, "inner", client, index)
        je = self.curved(h, s, p)
        return np.concatenate([(h.T @ je).ravel(), je.sum(0)]) + 2 * self.problem["ridge"] * p

    def curved(self, h: np.ndarray, s: np.ndarray, p: np.ndarray) -> np.ndarray:
        v, c = self.head(p)
        e = h @ v + c
        return s * (e - (s * e).sum(1, keepdims=True)) / len(h)

    def in_x(self, x: np.ndarray, y: np.ndarray, client: int, index: np.ndarray) -> np.ndarray:
        images, active, _, _, r = self.layers(x, y, "outer", client, index)
        d = (r @ self.head(y)[0].T) * active
        return np.concatenate([(images.T @ d).ravel(), d.sum(0)])

    def cross(self, x: np.ndarray, y: np.ndarray, p: np.ndarray, client: int, index: np.ndarray) -> np.ndarray:
        images, active, h, s, r = self.layers(x, y, "inner", client, index)
        d = (r @ self.head(p)[0].T + self.curved(h, s, p) @ self.head(y)[0].T) * active
        return np.concatenate([(images.T @ d).ravel(), d.sum(0)])

    def epochs(self, draws: dict[str, np.ndarray]) -> np.ndarray:
        x, y = (np.concatenate([self.problem[f"{v}_w"].ravel(), self.problem[f"{v}_b"]]) for v in "xy")
        beta, alpha, eta, terms = (self.problem[k] for k in NUMBERS[:4])
        for r in range(len(draws["cohorts"])):
            d, who = {k: a[r] for k, a in draws.items()}, list(enumerate(draws["cohorts"][r]))
            corrected, batches = "anchor_batches" in d, d["inner_batches"]
            if corrected:  # whatever the first one is, its correction is 0
                batches = np.concatenate([batches[:, -1:], batches], axis=1)
            tau = batches.shape[1]
            q = np.mean([self.in_y(x, y, "inner", c, d["anchor_batches"][i]) for i, c in who], 0) if corrected else 0
            ends = []
            for i, c in who:
                here = y
                for batch in batches[i]:
                    correction = q - self.in_y(x, y, "inner", c, batch) if corrected else 0
                    here = here - beta / tau * (self.in_y(x, here, "inner", c, batch) + correction)
                ends.append(here)
            y = np.mean(ends, 0)
            p = [
                terms * eta * self.in_y(x, y, "outer", c, d.get("start_batches", d["hyper_outer_batches"])[i])
                for i, c in who
            ]
            p = [np.mean(p, 0)] * len(who) if corrected else p
            for n in range(terms - 1):
                new = [
                    v - eta * self.product(x, y, v, c, d["product_batches"][i, n])
                    for v, (i, c) in zip(p, who, strict=True)
                ]
                new = [np.mean(new, 0)] * len(who) if corrected else new
                p = [b if n < d["lengths"][i] else a for i, (a, b) in enumerate(zip(p, new, strict=True))]
            hyper = [
                self.in_x(x, y, c, d["hyper_outer_batches"][i]) - self.cross(x, y, v, c, d["hyper_inner_batches"][i])
                for v, (i, c) in zip(p, who, strict=True)
            ]
            x = x - alpha * np.mean(hyper, 0)
        return np.concatenate([x, y])


if __name__ == "__main__":
    main()
