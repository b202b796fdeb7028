"""LFedNest by hand: FedAvg on y, then every client's own hypergradient, with its own Hessian."""

import jax

from benchmarks.peers.common import asked, batch, mean, move, zeros


def descent(problem, x, y, own, key, local_steps, batch_size, lr):
    """Return the change of y by a client's steps of size lr/local_steps; features of x are computed once."""
    features = problem.features(x, own["inner"])

    def step(change, key):
        some = batch(features, own["inner_size"], key, batch_size)
        return move(change, lr / local_steps, jax.grad(problem.head, 1)(some, move(y, -1, change))), None

    return jax.lax.scan(step, zeros(y), jax.random.split(key, local_steps))[0]


def hypergradient(problem, x, y, own, key, batch_size, terms, shrink, random):
    """Return ∇x f_i − ∇²xy g_i v, with v by a Neumann series of the client's Hessians, each on a new batch."""
    outer_key, inner_key, length_key, key = jax.random.split(key, 4)
    outer_batch = batch(own["outer"], own["outer_size"], outer_key, batch_size)
    inner_batch = batch(own["inner"], own["inner_size"], inner_key, batch_size)
    f_x, b = jax.grad(problem.outer, (0, 1))(x, y, outer_batch)
    features = problem.features(x, own["inner"])

    def product(n, v):
        some = batch(features, own["inner_size"], jax.random.fold_in(key, n), batch_size)
        hv = jax.jvp(lambda y: jax.grad(problem.head, 1)(some, y), (y,), (v,))[1]
        return move(v, shrink, hv) if random else move(move(v, shrink, hv), -shrink, b)

    count = jax.random.randint(length_key, (), 0, terms) if random else terms - 1
    v = jax.lax.fori_loop(0, count, product, jax.tree.map(lambda a: a * shrink * (terms if random else 1), b))
    cross = jax.grad(lambda x: jax.jvp(lambda y: problem.inner(x, y, inner_batch), (y,), (v,))[1])(x)
    return move(f_x, 1, cross)


def program(problem, *, local_steps, batch_size, terms, random=False, cohort=None, one_by_one=False):
    """Return run((x, y), data, weights, (β, Neumann step, α), key, rounds) -> (x, y)."""

    @jax.jit
    def run(start, data, weights, steps, key, rounds):
        lr, shrink, outer_lr = steps

        def once(r, carry):
            x, y = carry
            own, w, keys = asked(jax.random.fold_in(key, r), data, weights, cohort)
            w = w * (len(weights) / len(w))
            change = mean(
                lambda o, k: descent(problem, x, y, o, k, local_steps, batch_size, lr), own, w, keys, one_by_one
            )
            y = move(y, -1, change)
            keys = jax.random.split(jax.random.fold_in(key, -1 - r), len(w))
            ask = lambda o, k: hypergradient(problem, x, y, o, k, batch_size, terms, shrink, random)  # noqa: E731
            return move(x, outer_lr, mean(ask, own, w, keys, one_by_one)), y

        return jax.lax.fori_loop(0, rounds, once, start)

    return run
