"""The quadratic task without noise as NumPy matrices, for methods written out by hand."""

import numpy as np


def members(task):
    """[(weight, f's coefficients D, E, t, g's A, B, c)] of a task drawn with noise=0."""
    clients = task.clients
    rows = [[{k: m[0] for k, m in data.row(i).items()} for data in (clients.outer, clients.inner)] for i in
            range(len(clients))]  # fmt: skip
    return [(p, f, g) for p, (f, g) in zip(clients.weights, rows, strict=True)]


def mean_matrices(task):
    """Weighted means of A, B, c, D, E, and of D t as "Dt"."""
    every = [(p, {**f, **g, "Dt": f["D"] @ f["t"]}) for p, f, g in members(task)]
    return {name: sum(p * own[name] for p, own in every) for name in ("A", "B", "c", "D", "E", "Dt")}


def inner_gradient(g, x, y):
    """∇y g = A y − B x − c."""
    return g["A"] @ y - g["B"] @ x - g["c"]


def outer_gradient(f, x, y):
    """∇y f = D(y − t) + Eᵀx."""
    return f["D"] @ (y - f["t"]) + f["E"].T @ x


def hypergradient(f, g, x, y, v):
    """∇x f − ∇²xy g·v, with ∇x f = x + E y and ∇²xy g = −Bᵀ."""
    return x + f["E"] @ y + g["B"].T @ v


def directions(f, g, x, y, v):
    """The directions of x, y and v in single-loop methods."""
    return hypergradient(f, g, x, y, v), inner_gradient(g, x, y), g["A"] @ v - outer_gradient(f, x, y)


def fedavg_on_y(task, x, y, work, lr):
    """One round of FedAvg on y: the weighted mean of the clients' ends."""
    end = 0
    for (p, _, g), tau in zip(members(task), work, strict=True):
        own = y
        for _ in range(tau):
            own = own - lr / tau * inner_gradient(g, x, own)
        end = end + p * own
    return end


def end_with_series(task, step, terms):
    """x at rest, y = y*(x), of a method with v = step Σ_{k<terms} (I − step·H)^k ∇y F."""
    m = mean_matrices(task)
    to_y, offset = np.linalg.solve(m["A"], m["B"]), np.linalg.solve(m["A"], m["c"])
    shrink = np.eye(len(m["A"])) - step * m["A"]
    inverse = step * sum(np.linalg.matrix_power(shrink, k) for k in range(terms))
    back = m["B"].T @ inverse
    hessian = np.eye(len(m["E"])) + m["E"] @ to_y + back @ (m["D"] @ to_y + m["E"].T)
    return np.linalg.solve(hessian, -(m["E"] @ offset + back @ (m["D"] @ offset - m["Dt"])))
