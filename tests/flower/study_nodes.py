"""Nodes, servers and files for tests of studies over Flower, all in this process.

Each site has a CSV file of its own, and a test can end the server after a number of messages.
"""

import json

import federations
import pytest

from fedbilevel.estimators import fold_models
from fedbilevel.estimators.agreement import Agreement
from fedbilevel.experiments.study import played
from fedbilevel.flower import Flower, InProcess, Terms
from fedbilevel.flower.wire import RequestMessage, decode
from site_tables import SITES, tables


class Nodes(InProcess):
    """Nodes whose configurations have further entries: `own[client]` for one client, and `every` for all clients."""

    def __init__(self, app, own, every=None, **more):
        self.own, self.every = own, every or {}
        super().__init__(app, clients=len(own), **more)

    def join(self, client):
        super().join(client)
        context = max(self.contexts.items())[1]
        context.node_config.update({**self.every, **self.own[client]})


@pytest.fixture
def files(tmp_path):
    """Write a CSV file for each site, and return the entries of the node configurations that name these files."""
    for name, table in tables().items():
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    return [{"table": str(tmp_path / f"{name}.csv"), "site": name} for name in SITES]


def alone(given, nodes, name=federations.NAME, **terms):
    return played(given, Flower(grid=nodes, terms=Terms(quorum=1.0, **terms), name=name))


def phases(place):
    return [json.loads(line)["phase"] for line in (place / "exchanges.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """Ends a server at once, since no handler of errors catches it."""


def killed_after(count, nodes):
    """Return these nodes, whose server now ends at once before it would send more than `count` messages in all."""
    push, left = nodes.push_messages, [count]

    def some(messages):
        messages = [*messages]
        left[0] -= len(messages)
        if left[0] < 0:
            raise Killed
        return push(messages)

    nodes.push_messages = some
    return nodes


def killed_at(phase, count, nodes):
    """Change these nodes so that the server ends just before it sends message number `count` of a phase, and return
    them."""
    push, left = nodes.push_messages, [count]

    def some(messages):
        messages = [*messages]
        left[0] -= sum(decode(RequestMessage, message).phase == phase for message in messages)
        if left[0] <= 0:
            raise Killed
        return push(messages)

    nodes.push_messages = some
    return nodes


POSED, posed = {}, Agreement.posed


@pytest.fixture
def posed_once(monkeypatch):
    """Pose the problem of an agreement once, so that all sites in this process share the compiled phases."""

    def known(agreement):
        key = agreement.study.text, agreement.text, fold_models.WIDE
        if key not in POSED:
            POSED[key] = posed(agreement)
        return POSED[key]

    monkeypatch.setattr(Agreement, "posed", known)
