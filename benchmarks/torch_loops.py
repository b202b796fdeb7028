"""SimFBO, FedNest and LFedNest as loops over clients in PyTorch, as they are written without this library.

The program needs only torch and numpy, so that `floor` can run it by another interpreter:

    python torch_loops.py METHOD problem.npz result.npz ROUNDS [THREADS]

The task is hyper_representation: x is the first layer (w, b) of an MLP, and y is its head (w, b). The pages in
docs/reference/algorithms have the equations of a round.

- SimFBO uses torch.func.
- FedNest and LFedNest use autograd, which here takes 0.6 of the time of torch.func. In a round they make one step on x.
  They compute p, an estimate of the inverse Hessian times a gradient, by a series. Its numbers of products are 0, 1,
  …, N - 1 in turn.
- LFedNest uses one batch for both gradients of f.

Nothing is computed unnecessarily. The correction of FedNest's first corrected step is 0, so this step is along q. The
hidden units of a batch are computed once for both gradients of a corrected step. Only the step on x needs derivatives
in x.

`problem.npz` has these arrays, for M clients with S samples each:

- the start: x_w (D, H), x_b (H,), y_w (H, C) and y_b (C,); v begins at 0
- the samples: inner_images and outer_images (M, S, D), inner_labels and outer_labels (M, S)
- steps: the client's and the server's step sizes for SimFBO, and beta, eta and alpha for the other methods
- numbers: local_steps, terms (N), ridge, batch_size and cohort

With a batch_size of 0, all samples are used, and p is the whole series of N terms. Then the results can be compared
with those of other programs. `result.npz` has x_w, y_w and, for SimFBO, v_w at the end, and the milliseconds of a
round.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vjp

Layer = tuple[Tensor, ...]  # (w, b)
Batch = tuple[Tensor, Tensor]  # images or hidden units, labels
State = tuple[Layer, ...]  # (x, y), and v for SimFBO


class Peer:
    """The data and the step sizes. The methods of this class compute one client's part, or one round."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.data: dict[str, Batch] = {
            name: (torch.from_numpy(arrays[f"{name}_images"]), torch.from_numpy(arrays[f"{name}_labels"]).long())
            for name in ("inner", "outer")
        }
        numbers = "local_steps", "terms", "batch_size", "cohort"
        self.local_steps, self.terms, self.batch_size, self.cohort = (int(arrays[name]) for name in numbers)
        self.steps, self.ridge = arrays["steps"].tolist(), float(arrays["ridge"])
        self.lengths = itertools.cycle(range(self.terms))

    def clients(self) -> list[int]:
        return torch.randperm(len(self.data["inner"][1]))[: self.cohort].tolist()

    def batch(self, name: str, client: int) -> Batch:
        images, labels = (part[client] for part in self.data[name])
        if not self.batch_size:
            return images, labels
        index = torch.randint(len(labels), (self.batch_size,))
        return images[index], labels[index]

    @torch.no_grad()
    def hidden(self, x: Layer, name: str, client: int) -> Batch:
        """Return the hidden units and the labels of a batch, for derivatives in y only."""
        images, labels = self.batch(name, client)
        return units(x, images), labels

    def inner(self, x: Layer, y: Layer, batch: Batch) -> Tensor:
        return outer(x, y, batch) + self.ridge * (y[0].square().sum() + y[1].square().sum())

    def simfbo(self, state: State) -> State:
        """Return the state after one round."""
        sums = tuple(scaled(layer, 0) for layer in state)
        clients = self.clients()
        for client in clients:
            here = state
            for _ in range(self.local_steps):
                d = self.directions(*here, self.batch("inner", client), self.batch("outer", client))
                here = stepped(here, self.steps[:3], d)
                sums = tuple(added(total, new, 1) for total, new in zip(sums, d, strict=True))
        return stepped(state, self.steps[3:], tuple(scaled(layer, 1 / len(clients)) for layer in sums))

    def directions(self, x: Layer, y: Layer, v: Layer, inner_batch: Batch, outer_batch: Batch) -> State:
        """Return the directions of x, y and v. They take two reverse passes, one of them through the gradient of g."""
        d_y, pull = vjp(lambda x, y: grad(self.inner, argnums=1)(x, y, inner_batch), x, y)
        cross_v, hessian_v = pull(v)
        f_x, f_y = grad(outer, argnums=(0, 1))(x, y, outer_batch)
        return added(f_x, cross_v, -1), d_y, added(hessian_v, f_y, -1)

    def series(self, start: Layer, product: Callable[[Layer], Layer]) -> Layer:
        """Return p, about the inverse Hessian times `start`: some products with the Hessian, or the whole series."""
        eta = self.steps[1]
        b = scaled(start, eta)
        if not self.batch_size:
            p = b
            for _ in range(self.terms - 1):
                p = added(added(p, product(p), -eta), b, 1)
            return p
        p = scaled(b, self.terms)
        for _ in range(next(self.lengths)):
            p = added(p, product(p), -eta)
        return p

    def product(self, y: Layer, p: Layer, batch: Batch) -> Layer:
        """Return d2g/dyy p."""
        y = leaves(y)
        first = gradient(y, batch, twice=True)
        return added(torch.autograd.grad(first, y, p), p, 2 * self.ridge)

    def outer_step(self, x: Layer, y: Layer, clients: list[int], p_of: Callable[[int, Tensor, Layer], Layer]) -> Layer:
        """Return x after a step along the mean of df/dx - d2g/dxy p, with p = p_of(client, its f, y).

        A reverse pass over f - <dg/dy, p> gives a client's part; the ridge has no mixed derivative.
        """
        replies = []
        for client in clients:
            here, head = leaves(x), leaves(y)
            loss = outer(here, head, self.batch("outer", client))
            p = p_of(client, loss, head)
            images, labels = self.batch("inner", client)
            first = gradient(head, (units(here, images), labels), twice=True)
            pairing = sum((d * part).sum() for d, part in zip(first, p, strict=True))
            replies.append(torch.autograd.grad(loss - pairing, here))
        return added(x, mean(replies), -self.steps[2])

    def plain_steps(self, y: Layer, batches: Iterable[Batch]) -> Layer:
        """Return y after one step for each batch."""
        for batch in batches:
            y = leaves(y)
            y = added(y, added(gradient(y, batch), y, 2 * self.ridge), -self.steps[0] / self.local_steps)
        return y

    def corrected_steps(self, y: Layer, q: Layer, batches: Iterable[Batch]) -> Layer:
        """Return y after the step along q and a corrected step for each batch."""
        step, start = self.steps[0] / self.local_steps, leaves(y)
        y = added(y, q, -step)
        for batch in batches:
            y = leaves(y)
            both = torch.autograd.grad(head_loss(y, batch) - head_loss(start, batch), y + start)
            change = added(added(both[:2], both[2:], 1), added(y, start, -1), 2 * self.ridge)
            y = added(y, added(change, q, 1), -step)
        return y

    def fednest(self, state: State) -> State:
        """Return the state after one round."""
        (x, y), clients = state, self.clients()

        def over(of_client: Callable[[Batch], Layer], name: str = "inner") -> Layer:
            return mean([of_client(self.hidden(x, name, client)) for client in clients])

        q = added(over(lambda batch: gradient(leaves(y), batch)), y, 2 * self.ridge)
        drawn = [[self.hidden(x, "inner", client) for _ in range(self.local_steps - 1)] for client in clients]
        y = mean([self.corrected_steps(y, q, batches) for batches in drawn])
        b = over(lambda batch: gradient(leaves(y), batch), "outer")
        p = self.series(b, lambda p: over(lambda batch: self.product(y, p, batch)))
        return self.outer_step(x, y, clients, lambda *_: p), y

    def lfednest(self, state: State) -> State:
        """Return the state after one round."""
        (x, y), clients = state, self.clients()
        drawn = [[self.hidden(x, "inner", client) for _ in range(self.local_steps)] for client in clients]
        y = mean([self.plain_steps(y, batches) for batches in drawn])

        def own(client: int, loss: Tensor, head: Layer) -> Layer:
            b = torch.autograd.grad(loss, head, retain_graph=True)
            return self.series(b, lambda p: self.product(head, p, self.hidden(x, "inner", client)))

        return self.outer_step(x, y, clients, own), y


def units(x: Layer, images: Tensor) -> Tensor:
    """Return the hidden units."""
    return F.relu(torch.addmm(x[1], images, x[0]))


def head_loss(y: Layer, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a head on a batch of hidden units."""
    return F.cross_entropy(torch.addmm(y[1], batch[0], y[0]), batch[1])


def outer(x: Layer, y: Layer, batch: Batch) -> Tensor:
    """Return the outer loss."""
    return head_loss(y, (units(x, batch[0]), batch[1]))


def gradient(y: Layer, batch: Batch, twice: bool = False) -> Layer:
    """Return the gradient of the cross-entropy in y. With `twice`, it can be differentiated again."""
    return torch.autograd.grad(head_loss(y, batch), y, create_graph=twice)


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


def measure(method: str, problem: str, result: str, rounds: str, threads: str = "") -> None:
    """Run a problem. Write its numbers at the end, and the milliseconds per round."""
    if threads:
        torch.set_num_threads(int(threads))
    with np.load(problem) as stored:
        arrays: dict[str, Any] = dict(stored)
    state: State = tuple(tuple(torch.from_numpy(arrays[f"{part}_{k}"]) for k in "wb") for part in "xy")
    if method == "simfbo":
        state = *state, scaled(state[1], 0)
    one = getattr(Peer(arrays), method)
    one(state)  # work that is done once is not timed
    began = time.perf_counter()
    for _ in range(int(rounds)):
        state = one(state)
    ms = 1e3 * (time.perf_counter() - began) / int(rounds)
    np.savez(result, **{f"{part}_w": layer[0].numpy() for part, layer in zip("xyv", state, strict=False)}, ms=ms)


if __name__ == "__main__":
    measure(*sys.argv[1:])
