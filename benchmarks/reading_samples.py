"""The samples that a curious server can read from one client's answers, by three kinds of requests.

One client with 181 handwritten digits trains a linear classifier by FedAvg, with one local step per round, so an answer
is a gradient. The server is malicious: it sends classifiers of its choice, and as many requests as the client answers.
A sample counts as read if every pixel, from 0 to 1, is right to 1e-3.

- Batches of one sample: the gradient in the weights, divided by the gradient in the biases, is the sample.
- Batches of 8, with the classifier 0: if exactly one sample of the batch is of some class, the gradients reveal it.
- All samples at once: a classifier predicts its first class beyond a threshold. If one sample lies between the
  thresholds of two classifiers, the difference of their gradients reveals this sample. The server finds such
  thresholds by halving.
"""

import secrets
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flwr.app import RecordDict

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel import data
from fedbilevel.flower import Limits, Site
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.client.store import ContextStore
from fedbilevel.flower.wire import RequestMessage, from_bytes, to_bytes

SAMPLES, CLASSES = 181, 10
QUICK = {"most": 20}
NO_FLOORS = Limits(min_batch_size=1, min_local_samples=1, max_requests_per_round=10**6)


def loss(x, batch):
    logits = batch["image"] @ x["weight"] + x["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


class Server:
    """A server that sends requests to one client, and stores the samples that it has read."""

    def __init__(self, batch_size: int | None, limits: Limits, privacy: fb.Privacy | None, most: int) -> None:
        digits = data.load("digits")
        self.truth = digits.train_images.reshape(-1, 64)[:SAMPLES].astype(float)
        outer = {"image": self.truth, "label": digits.train_labels[:SAMPLES]}
        self.x0 = {"weight": jnp.zeros((64, CLASSES)), "bias": jnp.zeros(CLASSES)}
        algorithm = fb.FedAvg(local_steps=1, lr=1.0, batch_size=batch_size)
        folder = Path(tempfile.mkdtemp()) if privacy else None
        problem, own = fb.SingleLevel(loss), {"limits": limits, "privacy": privacy, "folder": folder}
        self.runtime = ClientRuntime(Site(id=0, algorithm=algorithm, problem=problem, x0=self.x0, outer=outer, **own))
        (self.call,) = self.runtime.contract.calls.values()
        self.memory, self.run, self.most = ContextStore(RecordDict()), secrets.token_hex(16), most
        self.asked, self.refused = 0, ""
        self.read: set[int] = set()

    def request(self, x: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        """Return the client's mean gradient at x, on samples that the client draws.

        The result is None if the client refuses, or after `most` requests.
        """
        if self.asked == self.most:
            return None
        key = np.asarray(jax.random.key_data(jax.random.key(self.asked))).tobytes()
        contract, payload = self.runtime.contract.digest, to_bytes(x)
        request = RequestMessage(run=self.run, contract=contract, round=self.asked,
                  phase=self.call.phase, call=self.call.name,
                  key=key, key_kind="threefry2x32", weight=1.0, payload=payload)  # fmt: skip
        answer = self.runtime.respond(request, self.memory)
        if answer.refused:
            self.refused = answer.refused
            return None
        self.asked += 1
        return {name: -np.asarray(leaf) for name, leaf in from_bytes(answer.payload, self.call.update).items()}

    def note(self, sample: np.ndarray) -> None:
        """Store a sample if it is a sample of the client."""
        near = np.max(np.abs(self.truth - sample), axis=1) < 1e-3
        self.read.update(np.flatnonzero(near).tolist())

    def single(self) -> None:
        """Request batches of one sample."""
        while (g := self.request(self.x0)) is not None:
            own = int(np.argmin(g["bias"]))
            self.note(g["weight"][:, own] / g["bias"][own])

    def small(self) -> None:
        """Request batches of 8 samples.

        At the classifier 0, all classes are equally likely. So the gradient for class c is (mean − sum of class c)/8,
        up to known factors, and the gradient of a class that is absent from the batch reveals the mean.
        """
        while (g := self.request(self.x0)) is not None:
            counts = np.round(8 * (0.1 - g["bias"]))
            if (absent := np.flatnonzero(counts == 0)).size:
                for single in np.flatnonzero(counts == 1):
                    self.note(8 * (g["weight"][:, absent[0]] - g["weight"][:, single]))

    def whole(self) -> None:
        """Request all samples at once. Bisect thresholds until exactly one sample is between two of them."""
        direction = np.random.default_rng(0).normal(size=64)

        def above(threshold: float) -> dict[str, np.ndarray] | None:
            steep = {"weight": np.zeros((64, CLASSES)), "bias": np.zeros(CLASSES)}
            steep["weight"][:, 0], steep["bias"][0] = 1e7 * direction, -1e7 * threshold
            return self.request(steep)

        ends = [(low := above(-40.0)), (high := above(40.0))]
        work = [(-40.0, 40.0, low, high)] if None not in ends else []
        while work:
            left, right, low, high = work.pop()
            count = (low["bias"][0] - high["bias"][0]) * SAMPLES
            if count < 0.5 or right - left < 1e-6:
                continue
            if count < 1.5:
                self.note((low["weight"][:, 0] - high["weight"][:, 0]) / (low["bias"][0] - high["bias"][0]))
                continue
            if (middle := above(threshold := (left + right) / 2)) is None:
                return
            work += [(left, threshold, low, middle), (threshold, right, middle, high)]


def main(most: int = 1500) -> None:
    jax.config.update("jax_enable_x64", True)
    noise = fb.Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    head("the server requests about", "the client has", "requests", f"samples read of {SAMPLES}", "refusal")
    kinds = {"one sample": (1, Server.single), "8 samples": (8, Server.small), "all samples": (None, Server.whole)}
    for kind, (batch_size, attack) in kinds.items():
        for client, limits, privacy in (
            ("no floors", NO_FLOORS, None),
            ("the default floors", Limits(), None),
            ("100 requests in all", Limits(max_requests=100), None),
            ("default floors and noise", Limits(), noise),
        ):
            server = Server(batch_size, limits, privacy, most)
            attack(server)
            row(kind, client, server.asked, len(server.read), server.refused)
