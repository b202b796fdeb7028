"""The peer: SimFBO as a serial PyTorch loop, one client after the other, with `torch.func`.

It stands alone (torch and numpy only), so that a benchmark can run it in a subprocess under another
interpreter, on the same start, data and batch indices as the engine, and compare numbers and time:

    python peer_torch.py problem.npz result.npz [--threads N] [--repeats K]

Task: hyper-representation. x = first layer (w, b), y = head (w, b) of an MLP; inner loss = cross-entropy on
training batches + ridge * |y|^2; outer loss = cross-entropy on validation batches. Plain SGD locally (a_k = 1),
equal weights (q = mean over the cohort), v not projected. For M clients, N samples each of D numbers, R rounds,
P clients a round, tau local steps and batches of B, the arrays of `problem.npz` are

    x_w (D, H), x_b (H,), y_w (H, C), y_b (C,), v_w (H, C), v_b (C,)      start
    inner_images, outer_images (M, N, D); inner_labels, outer_labels (M, N)
    cohorts (R, P); inner_batches, outer_batches (R, P, tau, B)           indices
    local_steps (3,), server_steps (3,)                                   step sizes of x, y, v
    ridge ()

and of `result.npz`: x_w ... v_b after R rounds, seconds_per_round (K,), torch_version, threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vjp

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
State = tuple[Params, Params, Params]
Loss = Callable[[Params, Params, Batch], Tensor]


def cross_entropy(x: Params, y: Params, batch: Batch) -> Tensor:
    """The outer loss: the network's mean cross-entropy on a batch."""
    images, labels = batch
    hidden = F.relu(images @ x["w"] + x["b"])
    return F.cross_entropy(hidden @ y["w"] + y["b"], labels)


def ridged(ridge: float) -> Loss:
    """The inner loss: cross-entropy plus ridge times the squared norm of the head."""

    def inner(x: Params, y: Params, batch: Batch) -> Tensor:
        return cross_entropy(x, y, batch) + ridge * (y["w"].square().sum() + y["b"].square().sum())

    return inner


def directions(
    outer: Loss, inner: Loss, x: Params, y: Params, v: Params, inner_batch: Batch, outer_batch: Batch
) -> State:
    """(d_x, d_y, d_v) at one point: two reverse passes, one of them through the gradient of the inner loss."""
    d_y, pull = vjp(lambda x, y: grad(inner, argnums=1)(x, y, inner_batch), x, y)
    cross_v, hessian_v = pull(v)
    f_x, f_y = grad(outer, argnums=(0, 1))(x, y, outer_batch)
    return ({k: f_x[k] - cross_v[k] for k in x}, d_y, {k: hessian_v[k] - f_y[k] for k in y})


def moved(params: Params, step: float, direction: Params) -> Params:
    """One gradient step."""
    return {k: params[k] - step * direction[k] for k in params}


def stepped(state: State, steps: tuple[float, float, float], d: State) -> State:
    """The simultaneous step of x, y and v."""
    (x, y, v), (a_x, a_y, a_v) = state, steps
    return moved(x, a_x, d[0]), moved(y, a_y, d[1]), moved(v, a_v, d[2])


def run(
    x: Params,
    y: Params,
    v: Params,
    inner_data: Batch,
    outer_data: Batch,
    cohorts: Tensor,
    inner_batches: Tensor,
    outer_batches: Tensor,
    *,
    local_steps: tuple[float, float, float],
    server_steps: tuple[float, float, float],
    ridge: float,
    rounds: int,
) -> State:
    """The state (x, y, v) after `rounds` rounds; shapes as in the module's docstring."""
    inner_loss = ridged(ridge)
    for r in range(rounds):
        total = tuple({k: torch.zeros_like(t) for k, t in p.items()} for p in (x, y, v))
        for c, client in enumerate(cohorts[r].tolist()):
            here = (x, y, v)
            inner_x, inner_l = inner_data[0][client], inner_data[1][client]
            outer_x, outer_l = outer_data[0][client], outer_data[1][client]
            for i, o in zip(inner_batches[r, c], outer_batches[r, c], strict=True):
                inner_batch, outer_batch = (inner_x[i], inner_l[i]), (outer_x[o], outer_l[o])
                d = directions(cross_entropy, inner_loss, *here, inner_batch, outer_batch)
                here = stepped(here, local_steps, d)
                for q, new in zip(total, d, strict=True):
                    for k in q:
                        q[k] += new[k]
        q_x, q_y, q_v = ({k: t / cohorts.shape[1] for k, t in q.items()} for q in total)
        x, y, v = stepped((x, y, v), server_steps, (q_x, q_y, q_v))
    return x, y, v


def main() -> None:
    """Read a problem, run it `repeats` times, write the final state and the seconds per round of each run."""
    parser = argparse.ArgumentParser(description="SimFBO as a serial PyTorch loop")
    parser.add_argument("problem", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--threads", type=int, help="PyTorch's own default if not given")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with np.load(options.problem) as problem:
        arrays = {k: torch.from_numpy(problem[k]) for k in problem.files}
    start: Any = tuple({k: arrays[f"{p}_{k}"] for k in ("w", "b")} for p in "xyv")
    data: Any = tuple((arrays[f"{s}_images"], arrays[f"{s}_labels"].long()) for s in ("inner", "outer"))
    index = [arrays[k].long() for k in ("cohorts", "inner_batches", "outer_batches")]
    rounds = len(index[0])
    steps: Any = {k: tuple(arrays[k].tolist()) for k in ("local_steps", "server_steps")}
    seconds = []

    def once(rounds: int) -> State:
        return run(*start, *data, *index, ridge=float(arrays["ridge"]), rounds=rounds, **steps)

    once(1)  # first-call costs of PyTorch are not the loop's
    for _ in range(options.repeats):
        begin = time.perf_counter()
        end = once(rounds)
        seconds.append((time.perf_counter() - begin) / rounds)
    state = {f"{p}_{k}": t.numpy() for p, part in zip("xyv", end, strict=True) for k, t in part.items()}
    np.savez(
        options.result,
        **state,
        seconds_per_round=np.array(seconds),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
