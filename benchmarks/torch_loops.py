"""SimFBO, FedNest and LFedNest as serial PyTorch loops, one client after the other, with which `speed` compares.

This program needs only torch and numpy, so that `speed` can run it by another interpreter. It gets the same start, data
and batch indices as the library, so that numbers and times can be compared:

    python torch_loops.py problem.npz result.npz [THREADS]

Task: hyper-representation. x = first layer (w, b), y = head (w, b) of an MLP; inner loss g = cross-entropy on training
samples + ridge * |y|^2; outer loss f = cross-entropy on validation samples; equal weights. One round of

    SimFBO      each client makes tau steps of x, y and v at once, along df/dx - d2g/dxy v, dg/dy and d2g/dyy v - df/dy;
                the server moves by the mean of the sums of their directions. With torch.func
    FedNest     q = mean of the clients' dg/dy; each client makes tau steps
                y_i <- y_i - beta/tau * (dg/dy(y_i) - dg/dy(y) + q), the same batch in both; y <- mean y_i;
                p = N * eta * mean df/dy; N' times p <- p - eta * mean (d2g/dyy p);
                h = mean (df/dx - d2g/dxy p); x <- x - alpha * h
    LFedNest    each client makes tau steps y_i <- y_i - beta/tau * dg/dy(y_i); y <- mean y_i;
                each client finds p and h as above by itself, f on one batch for both; x <- x - alpha * mean h

The first corrected step of FedNest is along q, since its correction is 0. Nothing is computed unnecessarily: the hidden
units of a batch are computed once for both gradients of a pair, and only h needs derivatives in x. The nested methods
use autograd, which takes 0.6 of the time of torch.func here.

For M clients, S samples each of D numbers, R rounds, P clients a round and batches of B, the arrays of `problem.npz`
are

    x_w (D, H), x_b (H,), y_w (H, C), y_b (C,)                            start; v starts at 0
    inner_images, outer_images (M, S, D); inner_labels, outer_labels (M, S)
    cohorts (R, P)                                                        clients
    inner_batches (R, P, tau, B), FedNest (R, P, tau - 1, B)              for the local steps, the corrected ones
    outer_batches (R, P, tau, B)                                          for the local steps; SimFBO alone
    anchor_batches (R, P, B)                                              for q; FedNest alone
    start_batches (R, P, B), of outer samples                             for df/dy; FedNest alone
    lengths (R, P); product_batches (R, P, N - 1, B)                      N', the same for all clients in FedNest
    hyper_outer_batches, hyper_inner_batches (R, P, B)                    for h
    steps (6,) or (3,)                                                    local and server steps; beta, eta, alpha
    terms, ridge, checked ()                                              N; see below

The first `checked` rounds are run once, and their result is stored. The remaining rounds continue from there, and are
timed. `result.npz` has x_w, y_w and SimFBO's v_w after the checked rounds, and the milliseconds of a timed round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vjp

Layer = tuple[Tensor, ...]  # (w, b)
Batch = tuple[Tensor, Tensor]  # images, labels
Draws = dict[str, Tensor]
State = tuple[Layer, ...]  # (x, y), and v for SimFBO


class Peer:
    """The data and the step sizes. The methods of this class compute one client's part, or one round."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.data: dict[str, Batch] = {
            name: (torch.from_numpy(arrays[f"{name}_images"]), torch.from_numpy(arrays[f"{name}_labels"]).long())
            for name in ("inner", "outer")
        }
        self.steps, self.terms, self.ridge = arrays["steps"].tolist(), int(arrays["terms"]), float(arrays["ridge"])

    def batch(self, name: str, client: int, index: Tensor) -> Batch:
        images, labels = self.data[name]
        return images[client][index], labels[client][index]

    def hidden(self, x: Layer, name: str, client: int, index: Tensor) -> Batch:
        """Return the hidden units and the labels of a batch, for derivatives in y only."""
        images, labels = self.batch(name, client, index)
        with torch.no_grad():
            return units(x, images), labels

    def inner(self, x: Layer, y: Layer, batch: Batch) -> Tensor:
        return outer(x, y, batch) + self.ridge * (y[0].square().sum() + y[1].square().sum())

    def simfbo(self, state: State, draws: Draws) -> State:
        """Return the state after one round."""
        sums = tuple(tuple(torch.zeros_like(t) for t in layer) for layer in state)
        clients = draws["cohorts"].tolist()
        for client, inner_batches, outer_batches in zip(
            clients, draws["inner_batches"], draws["outer_batches"], strict=True
        ):
            here = state
            for i, o in zip(inner_batches, outer_batches, strict=True):
                d = self.directions(*here, self.batch("inner", client, i), self.batch("outer", client, o))
                here = stepped(here, self.steps[:3], d)
                sums = tuple(added(total, new, 1) for total, new in zip(sums, d, strict=True))
        means = tuple(tuple(t / len(clients) for t in layer) for layer in sums)
        return stepped(state, self.steps[3:], means)

    def directions(self, x: Layer, y: Layer, v: Layer, inner_batch: Batch, outer_batch: Batch) -> State:
        """Return the directions of x, y and v. They take two reverse passes, one of them through the gradient of g."""
        d_y, pull = vjp(lambda x, y: grad(self.inner, argnums=1)(x, y, inner_batch), x, y)
        cross_v, hessian_v = pull(v)
        f_x, f_y = grad(outer, argnums=(0, 1))(x, y, outer_batch)
        return added(f_x, cross_v, -1), d_y, added(hessian_v, f_y, -1)

    def product(self, y: Layer, p: Layer, hidden: Tensor, labels: Tensor) -> Layer:
        """Return d2g/dyy p."""
        y = leaves(y)
        first = gradient(y, hidden, labels, twice=True)
        return added(torch.autograd.grad(first, y, p), p, 2 * self.ridge)

    def hypergradient(self, loss: Tensor, x: Layer, y: Layer, p: Layer, batch: Batch) -> Layer:
        """Return df/dx - d2g/dxy p, by one reverse pass over f - <dg/dy, p>; the ridge has no mixed derivative."""
        first = gradient(y, units(x, batch[0]), batch[1], twice=True)
        pairing = sum((d * part).sum() for d, part in zip(first, p, strict=True))
        return torch.autograd.grad(loss - pairing, x)

    def plain_steps(self, y: Layer, batches: list[Batch]) -> Layer:
        """Return y after one step for each batch."""
        step = self.steps[0] / len(batches)
        for hidden, labels in batches:
            y = leaves(y)
            y = added(y, added(gradient(y, hidden, labels), y, 2 * self.ridge), -step)
        return y

    def corrected_steps(self, y: Layer, q: Layer, batches: list[Batch]) -> Layer:
        """Return y after the step along q and a corrected step for each batch."""
        step, start = self.steps[0] / (len(batches) + 1), leaves(y)
        y = added(y, q, -step)
        for hidden, labels in batches:
            y = leaves(y)
            difference = head_loss(y, hidden, labels) - head_loss(start, hidden, labels)
            both = torch.autograd.grad(difference, y + start)
            change = added(added(both[:2], both[2:], 1), added(y, start, -1), 2 * self.ridge)
            y = added(y, added(change, q, 1), -step)
        return y

    def fednest(self, state: State, draws: Draws) -> State:
        """Return the state after one round."""
        (x, y), clients = state, draws["cohorts"].tolist()
        _, eta, alpha = self.steps

        def mean_gradient(name: str, batches: Tensor) -> Layer:
            pairs = zip(clients, batches, strict=True)
            return mean([gradient(leaves(y), *self.hidden(x, name, client, index)) for client, index in pairs])

        q = added(mean_gradient("inner", draws["anchor_batches"]), y, 2 * self.ridge)
        pairs = zip(clients, draws["inner_batches"], strict=True)
        y = mean([self.corrected_steps(y, q, [self.hidden(x, "inner", c, i) for i in part]) for c, part in pairs])
        p = scaled(mean_gradient("outer", draws["start_batches"]), self.terms * eta)
        for n in range(int(draws["lengths"][0])):
            pairs = zip(clients, draws["product_batches"][:, n], strict=True)
            p = added(p, mean([self.product(y, p, *self.hidden(x, "inner", c, i)) for c, i in pairs]), -eta)
        replies = []
        for i, client in enumerate(clients):
            here, head = leaves(x), leaves(y)
            loss = outer(here, head, self.batch("outer", client, draws["hyper_outer_batches"][i]))
            batch = self.batch("inner", client, draws["hyper_inner_batches"][i])
            replies.append(self.hypergradient(loss, here, head, p, batch))
        return added(x, mean(replies), -alpha), y

    def lfednest(self, state: State, draws: Draws) -> State:
        """Return the state after one round."""
        (x, y), clients = state, draws["cohorts"].tolist()
        _, eta, alpha = self.steps
        pairs = zip(clients, draws["inner_batches"], strict=True)
        y = mean([self.plain_steps(y, [self.hidden(x, "inner", c, i) for i in part]) for c, part in pairs])
        replies = []
        for i, client in enumerate(clients):
            here, head = leaves(x), leaves(y)
            loss = outer(here, head, self.batch("outer", client, draws["hyper_outer_batches"][i]))
            p = scaled(torch.autograd.grad(loss, head, retain_graph=True), self.terms * eta)
            for index in draws["product_batches"][i, : int(draws["lengths"][i])]:
                p = added(p, self.product(head, p, *self.hidden(x, "inner", client, index)), -eta)
            batch = self.batch("inner", client, draws["hyper_inner_batches"][i])
            replies.append(self.hypergradient(loss, here, head, p, batch))
        return added(x, mean(replies), -alpha), y


def units(x: Layer, images: Tensor) -> Tensor:
    """Return the hidden units."""
    return F.relu(torch.addmm(x[1], images, x[0]))


def head_loss(y: Layer, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a head."""
    return F.cross_entropy(torch.addmm(y[1], hidden, y[0]), labels)


def outer(x: Layer, y: Layer, batch: Batch) -> Tensor:
    """Return the outer loss."""
    return head_loss(y, units(x, batch[0]), batch[1])


def gradient(y: Layer, hidden: Tensor, labels: Tensor, twice: bool = False) -> Layer:
    """Return the gradient of the cross-entropy in y. With `twice`, it can be differentiated again."""
    return torch.autograd.grad(head_loss(y, hidden, labels), y, create_graph=twice)


def leaves(layer: Layer) -> Layer:
    return tuple(t.detach().requires_grad_() for t in layer)


def added(layer: Layer, other: Layer, factor: float) -> Layer:
    return tuple(torch.add(a.detach(), b.detach(), alpha=factor) for a, b in zip(layer, other, strict=True))


def scaled(layer: Layer, factor: float) -> Layer:
    return tuple(factor * t for t in layer)


def mean(layers: list[Layer]) -> Layer:
    return tuple(sum(parts[1:], start=parts[0]) / len(parts) for parts in zip(*layers, strict=True))


def stepped(state: State, steps: list[float], directions: State) -> State:
    """Return the state after one step along the directions of all its parts."""
    return tuple(added(part, d, -step) for part, d, step in zip(state, directions, steps, strict=True))


def rounds(one: Callable[[State, Draws], State], state: State, draws: Draws) -> State:
    """Return the state after all rounds for which there are draws."""
    for r in range(len(draws["cohorts"])):
        state = one(state, {name: index[r] for name, index in draws.items()})
    return state


def measure(problem: str, result: str, threads: str = "") -> None:
    """Run a problem. Write its numbers after the checked rounds, and the milliseconds per round."""
    if threads:
        torch.set_num_threads(int(threads))
    with np.load(problem) as stored:
        arrays: dict[str, Any] = dict(stored)
    peer, draws = Peer(arrays), {k: torch.from_numpy(a).long() for k, a in arrays.items() if k.endswith("_batches")}
    draws |= {k: torch.from_numpy(arrays[k]).long() for k in ("cohorts", "lengths") if k in arrays}
    state: State = tuple(tuple(torch.from_numpy(arrays[f"{part}_{k}"]) for k in "wb") for part in "xy")
    if "outer_batches" in draws:
        one, state = peer.simfbo, (*state, scaled(state[1], 0))
    else:
        one = peer.fednest if "anchor_batches" in draws else peer.lfednest
    checked = int(arrays["checked"])
    end = rounds(one, state, {k: a[:checked] for k, a in draws.items()})  # work that is done once is not timed
    timed = {k: a[checked:] for k, a in draws.items()}
    began = time.perf_counter()
    rounds(one, end, timed)
    ms = 1e3 * (time.perf_counter() - began) / len(timed["cohorts"])
    weights = {f"{part}_w": layer[0].numpy() for part, layer in zip("xyv", end, strict=False)}
    np.savez(result, **weights, ms=ms)


if __name__ == "__main__":
    measure(*sys.argv[1:])
