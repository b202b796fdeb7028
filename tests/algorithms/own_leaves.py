"""A quadratic problem in which some or all leaves of y are clients' own, and its solution in closed form.

The closed form: g_i = ½ yᵀA_i y − yᵀ(B_i x + c_i), f_i = ½‖y − t_i‖² + ½ρ‖x‖² and y = (s, o_i), where s is shared and
o_i is client i's own. With Y = (s, o_1, …, o_M), and E_i the rows of the identity that take (s, o_i) from Y, the joint
inner problem has the matrix H = Σ p_i E_iᵀA_iE_i:

    Y*(x) = K x + k,   K = H⁻¹ Σ p_i E_iᵀB_i,   k = H⁻¹ Σ p_i E_iᵀc_i
    x* = [ρI + Σ p_i (E_iK)ᵀE_iK]⁻¹ Σ p_i (E_iK)ᵀ(t_i − E_i k)

Clients differ in everything, also in their weights.
"""

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb

DIM_X, SHARED, OWN, RHO = 3, 3, 2, 0.5
WEIGHTS = np.array([0.1, 0.2, 0.3, 0.4])
CLIENTS, DIM_Y = len(WEIGHTS), SHARED + OWN


def drawn():
    random = np.random.default_rng(3)
    found = []
    for _ in range(CLIENTS):
        q = np.linalg.qr(random.normal(size=(DIM_Y, DIM_Y)))[0]
        a = q @ np.diag(random.uniform(1, 5, DIM_Y)) @ q.T
        found.append((a, random.normal(size=(DIM_Y, DIM_X)), *random.normal(size=(2, DIM_Y))))
    return found


MEMBERS = drawn()
SAMPLES = [{name: part[None] for name, part in zip("ABct", one, strict=True)} for one in MEMBERS]
POPULATION = fb.Clients(SAMPLES, weights=WEIGHTS)
START = {"own": np.full(OWN, 0.2), "shared": np.full(SHARED, -0.1)}
X0 = np.array([0.3, -0.2, 0.1])


def flat(y):
    return jnp.concatenate([y["shared"], y["own"]], -1)


def outer(x, y, batch):
    return jnp.mean(jnp.sum((flat(y) - batch["t"]) ** 2, axis=1)) / 2 + RHO / 2 * x @ x


def inner(x, y, batch):
    y = flat(y)
    return jnp.mean(jnp.einsum("a,nab,b->n", y, batch["A"], y) / 2 - (batch["B"] @ x + batch["c"]) @ y)


MIXED = fb.Bilevel(outer, inner, own=lambda path: path == "own")
ALL = fb.Bilevel(outer, inner, own=lambda path: True)


def closed_form(shared, last=None):
    """Return x*, and y* of all clients in the shape (M, DIM_Y), if the first `shared` entries of y are shared.

    With `last`, x* is the best point whose last entry is this number; the other entries solve their rows of the same
    system.
    """
    own = DIM_Y - shared
    takes = [np.zeros((DIM_Y, shared + CLIENTS * own)) for _ in MEMBERS]
    for i, e in enumerate(takes):
        e[:shared, :shared] = np.eye(shared)
        e[shared:, shared + i * own : shared + (i + 1) * own] = np.eye(own)
    each = list(zip(WEIGHTS, takes, MEMBERS, strict=True))
    h = sum(p * e.T @ a @ e for p, e, (a, *_) in each)
    jacobian = np.linalg.solve(h, sum(p * e.T @ b for p, e, (_, b, *_) in each))
    rest = np.linalg.solve(h, sum(p * e.T @ c for p, e, (*_, c, _) in each))
    system = RHO * np.eye(DIM_X) + sum(p * (e @ jacobian).T @ e @ jacobian for p, e, _ in each)
    right = sum(p * (e @ jacobian).T @ (t - e @ rest) for p, e, (*_, t) in each)
    if last is None:
        x = np.linalg.solve(system, right)
    else:
        x = np.append(np.linalg.solve(system[:-1, :-1], right[:-1] - system[:-1, -1] * last), last)
    return x, np.stack([e @ (jacobian @ x + rest) for e in takes])


def run(algorithm, problem=MIXED, rounds=4, clients=POPULATION, **options):
    return fb.solve(algorithm, problem, clients, X0, START, rounds=rounds, **options)


def everyone(result):
    return np.stack([flat(result.own(i)) for i in range(CLIENTS)])


SINGLE = {"local_steps": 1, "batch_size": None}
SIMFBO = fb.SimFBO(**SINGLE, server_lr=0.2, client_lr=0.1)
