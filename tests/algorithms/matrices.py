"""The quadratic task as NumPy matrices, for methods written out by hand and for where they end."""

import numpy as np


def members(task):
    """[(weight, f's coefficients D, E, t, g's A, B, c)]; within a client the samples differ in c and t alone."""
    clients = task.clients
    rows = zip(*([data.row(i) for i in range(len(clients))] for data in (clients.outer, clients.inner)), strict=True)
    means = [[{name: leaf.mean(0) for name, leaf in row.items()} for row in both] for both in rows]
    return [(p, f, g) for p, (f, g) in zip(clients.weights, means, strict=True)]


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


def neumann(matrix, step, terms):
    """The series step Σ_{n<terms} (I − step·matrix)^n, for its inverse."""
    shrink = np.eye(len(matrix)) - step * matrix
    return step * sum(np.linalg.matrix_power(shrink, n) for n in range(terms))


def rest(task, parts):
    """x where Σ p [x + E y + BᵀP(D y − Dt + Eᵀx)] = 0 at y = y*(x), over `parts` of (p, matrices, P)."""
    m = mean_matrices(task)
    to_y, offset = np.linalg.solve(m["A"], m["B"]), np.linalg.solve(m["A"], m["c"])
    left, right = 0, 0
    for p, own, inverse in parts:
        back = own["B"].T @ inverse
        left = left + p * (np.eye(len(back)) + own["E"] @ to_y + back @ (own["D"] @ to_y + own["E"].T))
        right = right - p * (own["E"] @ offset + back @ (own["D"] @ offset - own["Dt"]))
    return np.linalg.solve(left, right)


def end_with_series(task, step, terms):
    """x at rest of a method with v = step Σ_{k<terms} (I − step·H)^k ∇y F."""
    m = mean_matrices(task)
    return rest(task, [(1.0, m, neumann(m["A"], step, terms))])


def end_of_own(task, inverse=lambda i, hessian: np.linalg.inv(hessian)):
    """x at rest of a method that follows the mean of clients' own hypergradients, each with an inverse of its own."""
    own = [(p, {**f, **g, "Dt": f["D"] @ f["t"]}) for p, f, g in members(task)]
    return rest(task, [(p, m, inverse(i, m["A"])) for i, (p, m) in enumerate(own)])
