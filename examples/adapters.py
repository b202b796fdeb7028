"""Train low-rank adapters of a small transformer on texts, some of which are noise; x says how far to trust each text.

    .venv/bin/python examples/adapters.py

A transformer has learned to count up by ones. Four clients want it to count up by twos. y has adapters of rank 4 for
the transformer's matrices; the transformer itself does not change, and the losses close over it. Three of ten training
texts are noise. x has a weight for each training text of each client, and the best x has the smallest loss on
validation texts. Dropout on the adapters draws its random numbers from each sample's own key.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedbilevel as fb

LETTERS, LENGTH, WIDTH, RANK, CLIENTS, TEXTS = 16, 12, 32, 4, 4, 30
rng = np.random.default_rng(0)


def counting(texts, step):
    """Return texts of the letters 0 to 15 that count up by `step`, each from a random letter."""
    start = rng.integers(0, LETTERS, (texts, 1))
    return ((start + step * np.arange(LENGTH)) % LETTERS).astype(np.int32)


def network(w, text):
    """Return the score of each letter as the next one, at each place: shape (texts, length, letters)."""
    a = w["letters"][text] + w["places"][: text.shape[1]]
    q, k, v = (a @ w[name] for name in ("query", "key", "value"))
    past = jnp.tril(jnp.ones((text.shape[1],) * 2, bool))
    seen = jax.nn.softmax(jnp.where(past, q @ k.mT / WIDTH**0.5, -jnp.inf))
    a = a + seen @ v @ w["mix"]
    return (a + jax.nn.relu(a @ w["up"]) @ w["down"]) @ w["out"]


def errors(w, text):
    """Return the mean cross-entropy of each text's next letters, in shape (texts,)."""
    scores = network(w, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:]).mean(axis=1)


def accuracy(w, text):
    return jnp.mean(jnp.argmax(network(w, text[:, :-1]), axis=-1) == text[:, 1:])


def pretrained():
    """Train a transformer to count up by ones, and return its weights."""
    square = dict.fromkeys(("query", "key", "value", "mix", "up", "down"), (WIDTH, WIDTH))
    shapes = {"letters": (LETTERS, WIDTH), "places": (LENGTH, WIDTH), **square, "out": (WIDTH, LETTERS)}
    w = {name: rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5 for name, shape in shapes.items()}
    optimizer, text = optax.adam(0.01), counting(64, 1)

    def step(carry, _):
        w, state = carry
        change, state = optimizer.update(jax.grad(lambda w: errors(w, text).mean())(w), state)
        return (optax.apply_updates(w, change), state), None

    return jax.lax.scan(step, (w, optimizer.init(w)), length=300)[0][0]


BASE = pretrained()
ADAPTED = ("value", "mix", "up", "down", "out")


def adapted(y, key=None):
    """Return the transformer's weights with the adapters added.

    With a key, a tenth of the adapters' inner units is dropped.
    """
    w = dict(BASE)
    for number, name in enumerate(ADAPTED):
        middle = y[name]["down"]
        if key is not None:
            kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, (RANK,))
            middle = middle * kept / 0.9
        w[name] = w[name] + middle @ y[name]["up"]
    return w


def outer(x, y, batch):
    return jnp.mean(errors(adapted(y), batch["text"]))


def inner(x, y, batch, key):
    trust = jax.nn.sigmoid(x[batch["client"], batch["number"]])
    size = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))
    return jnp.mean(trust * errors(adapted(y, key), batch["text"])) + 1e-3 * size


training, wrong = [], np.zeros((CLIENTS, TEXTS), bool)
for client in range(CLIENTS):
    text, numbers = counting(TEXTS, 2), np.arange(TEXTS)
    wrong[client, rng.permutation(TEXTS)[: TEXTS * 3 // 10]] = True
    text[wrong[client]] = rng.integers(0, LETTERS, (wrong[client].sum(), LENGTH))
    training.append({"text": text, "number": numbers, "client": np.full(TEXTS, client)})
clients = fb.Clients([{"text": counting(20, 2)} for _ in range(CLIENTS)], training)

y0 = {
    name: {
        "down": (rng.normal(size=(BASE[name].shape[0], RANK)) / BASE[name].shape[0] ** 0.5).astype(np.float32),
        "up": np.zeros((RANK, BASE[name].shape[1]), np.float32),
    }
    for name in ADAPTED
}
x0 = np.zeros((CLIENTS, TEXTS), np.float32)
test = counting(200, 2)

if __name__ == "__main__":
    print(f"before: {accuracy(BASE, test):.0%} of the next letters are right")
    method = fb.SimFBO(batch_size=None, local_steps=5)
    result = fb.solve(method, fb.Bilevel(outer, inner), clients, x0, y0, rounds=400)
    trust = jax.nn.sigmoid(result.x)
    print(f"after:  {accuracy(adapted(result.y), test):.0%}")
    print(f"trust in right texts {trust[~wrong].mean():.2f}, in wrong ones {trust[wrong].mean():.2f}")
