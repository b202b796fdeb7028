"""The quadratic task as NumPy matrices, for rounds written out by hand and for the points where methods end."""

import numpy as np


def members(task):
    """Return (weight, f's coefficients D, E, t, g's coefficients A, B, c) for each client.

    The samples of a client differ only in c and t; these are means over its samples.
    """
    clients = task.clients
    rows = zip(*([data.row(i) for i in range(len(clients))] for data in (clients.outer, clients.inner)), strict=True)
    means = [[{name: leaf.mean(0) for name, leaf in row.items()} for row in both] for both in rows]
    return [(p, f, g) for p, (f, g) in zip(clients.weights, means, strict=True)]


def mean_matrices(task):
    """Return the weighted means over clients of A, B, c, D and E, and of D t under the name "Dt"."""
    every = [(p, {**f, **g, "Dt": f["D"] @ f["t"]}) for p, f, g in members(task)]
    return {name: sum(p * own[name] for p, own in every) for name in ("A", "B", "c", "D", "E", "Dt")}


def inner_gradient(g, x, y):
    """Return ∇y g = A y − B x − c."""
    return g["A"] @ y - g["B"] @ x - g["c"]


def outer_gradient(f, x, y):
    """Return ∇y f = D(y − t) + Eᵀx."""
    return f["D"] @ (y - f["t"]) + f["E"].T @ x


def hypergradient(f, g, x, y, v):
    """Return ∇x f − ∇²xy g·v, where ∇x f = x + E y and ∇²xy g = −Bᵀ."""
    return x + f["E"] @ y + g["B"].T @ v


def directions(f, g, x, y, v):
    """Return the directions along which single-loop methods move x, y and v."""
    return hypergradient(f, g, x, y, v), inner_gradient(g, x, y), g["A"] @ v - outer_gradient(f, x, y)


def fedavg_on_y(task, x, y, work, lr):
    """Return y after one round of FedAvg: the weighted mean of the points where the clients' local steps end."""
    end = 0
    for (p, _, g), tau in zip(members(task), work, strict=True):
        own = y
        for _ in range(tau):
            own = own - lr / tau * inner_gradient(g, x, own)
        end = end + p * own
    return end


def neumann(matrix, step, terms):
    """Return the Neumann series step·Σ_{n<terms} (I − step·matrix)^n, which approximates the inverse of the matrix."""
    shrink = np.eye(len(matrix)) - step * matrix
    return step * sum(np.linalg.matrix_power(shrink, n) for n in range(terms))


def rest(task, parts):
    """Return x with Σ p [x + E y + BᵀP(D y − Dt + Eᵀx)] = 0 at y = y*(x), summed over `parts` of (p, matrices, P)."""
    m = mean_matrices(task)
    to_y, offset = np.linalg.solve(m["A"], m["B"]), np.linalg.solve(m["A"], m["c"])
    left, right = 0, 0
    for p, own, inverse in parts:
        back = own["B"].T @ inverse
        left = left + p * (np.eye(len(back)) + own["E"] @ to_y + back @ (own["D"] @ to_y + own["E"].T))
        right = right - p * (own["E"] @ offset + back @ (own["D"] @ offset - own["Dt"]))
    return np.linalg.solve(left, right)


def end_with_series(task, step, terms):
    """Return the x at which a method rests whose v is step·Σ_{k<terms} (I − step·H)^k ∇y F."""
    m = mean_matrices(task)
    return rest(task, [(1.0, m, neumann(m["A"], step, terms))])


def end_of_own(task, inverse=lambda i, hessian: np.linalg.inv(hessian)):
    """Return the x at which a method rests that follows the mean of the clients' own hypergradients.

    `inverse` gives the matrix that client i uses as the inverse of its own Hessian.
    """
    own = [(p, {**f, **g, "Dt": f["D"] @ f["t"]}) for p, f, g in members(task)]
    return rest(task, [(p, m, inverse(i, m["A"])) for i, (p, m) in enumerate(own)])
