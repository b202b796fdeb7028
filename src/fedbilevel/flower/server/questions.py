"""Ask all sites questions before a run begins. Questions and answers are texts.

Questions are handled like the requests of phases: the roster checks contracts and keys, deadlines apply, sites count
questions within their limits, and the log has a line for each attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ExchangeError
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.server.roster import ask, tell_stalled
from fedbilevel.flower.server.session import ExchangeLog, roster_of
from fedbilevel.flower.wire import AGREEMENT, QUESTION, Contract, RequestMessage, ResponseMessage, reading

LONGEST_ANSWER = 2**23  # the largest number of bytes of an answer


class Questions:
    """Ask questions to which every client has to answer.

    Args:
        flower: a `Flower`. The annotation is Any because the module of this class imports other modules of this
            package.
        contract: the contract to which the clients have to agree.
        clients: the number of clients.
    """

    def __init__(self, flower: Any, contract: Contract, clients: int) -> None:
        self.terms, self.clients, self.exchanges = flower.terms, range(clients), 0
        self.roster = roster_of(flower, contract, clients)
        self.log = ExchangeLog(None if flower.log is None else Path(flower.log), self.roster.names)

    def question(self, text: str) -> list[str]:
        """Return the answers of all clients to a question, in the order of clients."""
        return self.answers(QUESTION, text)

    def agree(self, text: str) -> None:
        """Send a text to every client. A client keeps the text for the rest of the run."""
        self.answers(AGREEMENT, text)

    def tell(self, text: str) -> None:
        """Send a question once to the clients that are online, to inform them; their answers are ignored.

        Clients that are offline get nothing, and answers are awaited until the deadline at most.
        """
        self.roster.refresh()
        self.attempt(self.next_number(), QUESTION, 0, text, [*self.roster.nodes])

    def answers(self, kind: str, text: str) -> list[str]:
        """Send a text to every client, and again to clients that do not answer. Return the answers.

        Raises:
            ExchangeError: a client has not answered in `Terms.attempts` attempts. The message names the client and the
                reason.
        """
        found: dict[int, str] = {}
        failed: dict[int, Refusal] = {}
        number = self.next_number()
        for attempt in range(self.terms.attempts):
            left = [client for client in self.clients if client not in found]
            self.roster.wait(left, len(left), len(left))
            new, failed = self.attempt(number, kind, attempt, text, left)
            found |= new
            if len(found) == len(self.clients):
                return [found[client] for client in self.clients]
        reasons = self.roster.names.in_words(failed.values())
        said = f"{kind}: {len(found)} of {len(self.clients)} clients answered ({reasons})"
        counts = {"replies": len(found), "needed": len(self.clients)}
        raise ExchangeError(said, phase=kind, **counts, refusals=failed.values())

    def next_number(self) -> int:
        """Return the number of a new exchange."""
        self.exchanges += 1
        return self.exchanges - 1

    def attempt(
        self, number: int, kind: str, attempt: int, text: str, clients: Sequence[int]
    ) -> tuple[dict[int, str], dict[int, Refusal]]:
        """Send a text to some clients.

        Return two dictionaries: client -> its answer, and client -> why there is no answer.
        """
        began, found, responses = self.roster.clock.time(), dict[int, str](), list[ResponseMessage]()
        requests = {client: self.request(client, number, kind, text) for client in clients}
        replies, failed = ask(self.roster, requests)
        for reply in replies:
            try:
                with reading(reply.client):
                    response = reply.response()
                    if len(response.payload) > LONGEST_ANSWER:
                        raise Refusal(Code.LARGE, f"its answer has more than {LONGEST_ANSWER} bytes")
                    found[reply.client] = response.payload.decode()
                    responses.append(response)
            except Refusal as refusal:
                failed[reply.client] = refusal
        tell_stalled(failed, len(clients))
        seconds = self.roster.clock.time() - began
        self.log((0, number, kind, attempt), seconds, [*requests.values()], responses, failed)
        return found, failed

    def request(self, client: int, number: int, kind: str, text: str) -> RequestMessage:
        """Return the request by which a text is sent to a client."""
        contract = self.roster.contract_of(client).digest
        return RequestMessage(
            run=self.roster.run, contract=contract, exchange=number, phase=kind, payload=text.encode()
        )
