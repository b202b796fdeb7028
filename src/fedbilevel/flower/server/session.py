"""What the exchanges of one run share on the server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.problem import Problem
from fedbilevel.core.remote import RemoteClients
from fedbilevel.engines.submodels import SubmodelPlan
from fedbilevel.flower.server.clock import ServerClock
from fedbilevel.flower.server.dispatcher import Dispatcher
from fedbilevel.flower.server.exchange_log import ExchangeLog
from fedbilevel.flower.server.norm_bounds import NormBounds
from fedbilevel.flower.server.phase_queues import PhaseQueues
from fedbilevel.flower.server.registry import ClientRegistry
from fedbilevel.flower.server.rollback import Rollback
from fedbilevel.flower.server.terms import Backoff, Terms
from fedbilevel.flower.wire.contract import Contract


@dataclass
class Session:
    """One run on the server: its clients, the connections to them, and what their replies have left behind.

    Args:
        name: the run's name in every request, 8 to 64 hexadecimal digits.
        algorithm, problem: as given to `solve`; the fields of the algorithm are not those of one round.
        clients: the population, M clients.
        cohort: how many clients a round draws.
        contract: the contract of clients that hold the whole model.
        submodel_plan: which clients hold which submodels; None where all hold the whole model.
        backoff: which clients are not asked for some rounds, since they failed.
        norms: which Euclidean norms of updates are usual, by phase.
        counted: (M, 2) round and exchange of each client's last reply that counted and could change its state.
        settled: (M, 2) `counted` as it was when the current round began.
    """

    name: str
    algorithm: Algorithm
    problem: Problem
    clients: RemoteClients
    cohort: int
    terms: Terms
    clock: ServerClock
    contract: Contract
    submodel_plan: SubmodelPlan | None
    registry: ClientRegistry
    dispatcher: Dispatcher
    backoff: Backoff
    norms: NormBounds
    rollback: Rollback
    exchange_log: ExchangeLog
    phase_queues: PhaseQueues
    counted: np.ndarray
    settled: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """(M,) the weight p_i of each client; their sum is 1."""
        return self.clients.weights
