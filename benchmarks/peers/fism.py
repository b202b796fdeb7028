"""FISM by hand: every client makes a step for each of its samples, and the server takes the mean of the results."""

import jax
import jax.numpy as jnp


def program(problem):
    """Return run((x, average), data, mask, (γ₁, a, λ₁, b), key, rounds) -> (x, average); mask is (M, n)."""

    @jax.jit
    def run(start, data, mask, steps, _, rounds):
        lr, lr_decay, weight, weight_decay = steps

        def once(k, carry):
            x, average, total = carry
            gamma, penalty = lr / (k + 1.0) ** lr_decay, weight / (k + 1.0) ** weight_decay
            h = penalty * jax.grad(problem.outer)(x)

            def walk(samples, mask):
                def step(z, sample):
                    one, there = sample
                    g = jax.grad(problem.inner)(z, jax.tree.map(lambda a: a[None], one))
                    return jnp.where(there, problem.project(z - gamma * (g + h)), z), None

                return jax.lax.scan(step, x, (samples, mask))[0]

            new = problem.project(jax.vmap(walk)(data, mask).mean(0))
            total = total + gamma
            return new, average + gamma / total * (x - average), total

        x, average, _ = jax.lax.fori_loop(0, rounds, once, (*start, jnp.zeros(())))
        return x, average

    return run
