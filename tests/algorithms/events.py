"""Simulate asynchronous methods on the quadratic task in NumPy, event by event, with a table of last replies.

The server of the simulation keeps the table. The simulation follows the description of `Fed.sum_first`, for clients
that always need the same time, and uses no code of the engines.
"""

import numpy as np
from matrices import directions, hypergradient, inner_gradient, members, neumann, outer_gradient

import fedbilevel as fb
from fedbilevel.core.config import Schedule

TICK = 1e-4  # seconds: all times are whole numbers of ticks, so that rounding never decides which reply comes first


class Federation:
    """Clients with the exchange on which each works and the time at which it will be done.

    A kind of exchange is a word. A reply is computed when the client is asked for it.
    """

    def __init__(self, task, times, absent=(), arrivals=None):
        """Take each client's time, or a table of arrivals.

        Args:
            absent: clients that never reply.
            arrivals: boolean rows, one for each exchange of any kind, which say whose replies arrive in it. With
                arrivals, each exchange takes times[0].
        """
        self.arrivals, self.begun = arrivals, 0  # begun: the number of exchanges of any kind
        self.members, self.times = members(task), [round(t / TICK) for t in times]
        self.there = [i for i in range(len(times)) if i not in absent]
        self.now, self.at_work, self.early = 0, {}, []  # at_work: client -> (arrival, exchange, kind, answer)
        self.exchanges, self.table = {}, {}  # table: kind -> client -> (exchange, answer)
        self.handed_in = {}  # (kind, client) -> exchange of its kind in which the client handed in last

    def sum_first(self, n, kind, answer, max_staleness=None):
        """Make an exchange in which the first n replies count.

        It returns Σ p_i u_i / Σ p_i over the table, the mean age of the replies in the table, and the mean delay over
        all clients.
        """
        number = self.exchanges.get(kind, 0)
        table = self.table.setdefault(kind, {})
        needed = n - sum(k == kind for k, *_ in self.early)
        for _, i, when, u in [one for one in self.early if one[0] == kind]:
            table[i] = when, u
        self.early = [one for one in self.early if one[0] != kind]
        if self.arrivals is not None:
            self.deliver(kind, number, answer, table)
            return self.mean(kind, number, table, answer(0))
        # the clients that reply to this exchange or an earlier one of its kind: client -> (arrival, exchange, answer)
        queue = {}
        fresh = {}  # the clients that are asked now, or as soon as they are done with another kind: client -> when
        for i in self.there:
            if i not in self.at_work:
                fresh[i] = self.now
            elif self.at_work[i][2] == kind:
                queue[i] = self.at_work[i][:2] + self.at_work[i][3:]
            else:
                fresh[i] = self.at_work[i][0]
        queue |= {i: (start + self.times[i], number, answer(i)) for i, start in fresh.items()}
        order = sorted(queue, key=lambda i: (queue[i][0], queue[i][1], i))
        arrived = order[: max(needed, 0)]
        end = queue[arrived[-1]][0] if arrived else self.now
        if max_staleness is not None:
            late = [queue[i][0] for i in queue if i not in fresh and number - queue[i][1] >= max_staleness]
            late += [queue[i][0] for i in fresh if number - self.handed_in.get((kind, i), 0) > max_staleness]
            if late and max(late) >= end:
                end = max(late)
                arrived = sorted({*arrived, *(i for i in order if queue[i][0] <= end)})
        for i, start in fresh.items():
            # the client is asked in this exchange, after it has handed in its reply of another kind, if any
            if start <= end:
                if i in self.at_work:
                    _, when, other, u = self.at_work[i]
                    self.early.append((other, i, when, u))
                    self.handed_in[other, i] = self.exchanges[other]
                arrival, when, u = queue[i]
                self.at_work[i] = arrival, when, kind, u
        for i in arrived:
            table[i] = queue[i][1:]
            self.handed_in[kind, i] = number
            del self.at_work[i]
        self.now = end
        return self.mean(kind, number, table, answer(0))

    def deliver(self, kind, number, answer, table):
        """Ask all idle clients; let clients that the schedule names hand in their replies, each for its own kind."""
        for i in set(self.there) - self.at_work.keys():
            self.at_work[i] = None, number, kind, answer(i)
        named, self.begun = self.arrivals[self.begun % len(self.arrivals)], self.begun + 1
        for i in np.flatnonzero(named).tolist():
            _, when, of, u = self.at_work.pop(i)
            if of == kind:
                table[i] = when, u
            else:
                self.early.append((of, i, when, u))
        self.now += self.times[0]

    def mean(self, kind, number, table, like):
        """Return the mean of all last replies, their mean age, and the mean delay over all clients.

        The mean is 0 before the first reply. The mean and the age are over the clients that have replied.
        """
        self.exchanges[kind] = number + 1
        weight = {i: self.members[i][0] for i in range(len(self.times))}
        known = sum(weight[i] for i in table) or 1.0
        mean = [sum((weight[i] * u[k] for i, (_, u) in table.items()), 0 * of) / known for k, of in enumerate(like)]
        delay = sum(p * (number - (table[i][0] if i in table else -1)) for i, p in weight.items())
        age = sum(weight[i] * (number - asked) for i, (asked, _) in table.items()) / known
        return mean, age, delay


def mean_of_local_gradients(g, x, y, steps, lr):
    """Return AFBO's G_i, the mean of the gradients along a client's local steps."""
    total, point = 0.0, y
    for _ in range(steps):
        gradient = inner_gradient(g, x, point)
        total, point = total + gradient, point - lr * gradient
    return total / steps


def afbo(task, algorithm, rounds, n, times, work, absent=(), arrivals=None):
    """Run AFBO; return (x, y, v) after all rounds, and the two delays and the time after each round.

    `work` has the numbers of local steps: E_i, or E_i^{t,k} for round t and inner round k.
    """
    fed, told = Federation(task, times, absent, arrivals), []
    x, y, v = np.zeros(task.x0.shape), np.zeros(task.y0.shape), np.zeros(task.y0.shape)
    c, wait = 0.0, None
    if algorithm.asks.asynchronous:
        c, wait, algorithm = algorithm.late.delay_penalty, algorithm.late.max_staleness, algorithm.algorithm
    local = isinstance(algorithm.hypergradient, fb.parts.LocalImplicit)

    def series(matrix, b, i):
        solver = algorithm.hypergradient.solver
        return neumann(matrix, solver.step, np.broadcast_to(solver.terms, len(times))[i]) @ b

    inner_rounds = algorithm.inner.rounds
    work = np.broadcast_to(work, (rounds, inner_rounds, len(times)))
    lr = algorithm.inner.lr
    beta = lr.function if isinstance(lr, Schedule) else lambda t, k: np.broadcast_to(lr, inner_rounds)[k]
    for t in range(rounds):
        for k in range(inner_rounds):

            def inner(i, x=x, y=y, steps=work[t, k]):
                return [mean_of_local_gradients(fed.members[i][2], x, y, steps[i], algorithm.inner.client_lr)]

            (g,), inner_age, inner_delay = fed.sum_first(n, "inner", inner, wait)
            y = y - beta(t, k) / (1 + c * inner_age) * g

        def outer(i, x=x, y=y, v=v):
            _, f, g = fed.members[i]
            b = outer_gradient(f, x, y)
            if local:
                return [hypergradient(f, g, x, y, series(g["A"], b, i))]
            return [hypergradient(f, g, x, y, v), g["A"] @ v - b]

        (h, *r), outer_age, outer_delay = fed.sum_first(n, "outer", outer, wait)
        x = x - algorithm.outer_lr / (1 + c * outer_age) * h
        if r:
            v = v - algorithm.hypergradient.lr / (1 + c * outer_age) * r[0]
        told.append((inner_delay, outer_delay, fed.now * TICK))
    return (x, y, v), np.array(told)


def simfbo(task, algorithm, rounds, n, times, work, robust=False):
    """Run SimFBO, or ShroFBO if `robust`, with plain coefficients.

    It returns (x, y, v) after all rounds, and the delay and the time after each round.
    """
    fed, told = Federation(task, times), []
    x, y, v = np.zeros(task.x0.shape), np.zeros(task.y0.shape), np.zeros(task.y0.shape)
    eta, gamma = algorithm.client_lr, algorithm.server_lr
    for _ in range(rounds):

        def q(i, start=(x, y, v)):
            _, f, g = fed.members[i]
            x, y, v = start
            total = [0.0, 0.0, 0.0]
            for _ in range(work[i]):
                dx, dy, dv = directions(f, g, x, y, v)
                total = [t + d for t, d in zip(total, (dx, dy, dv), strict=True)]
                x, y, v = x - eta.x * dx, y - eta.y * dy, v - eta.v * dv
            return [*(t / work[i] for t in total), work[i]] if robust else [*total, 1.0]

        (qx, qy, qv, ease), _, delay = fed.sum_first(n, "q", q)
        rho = ease if robust else 1.0
        x, y, v = x - gamma.x * rho * qx, y - gamma.y * rho * qy, v - gamma.v * rho * qv
        told.append((delay, fed.now * TICK))
    return (x, y, v), np.array(told)
