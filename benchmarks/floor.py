"""The library beside hand-written JAX programs of the same mathematics: first call, second call, rounds, memory.

    .venv/bin/python benchmarks/floor.py [--rows NAME ...] [--passes 3] [--cores] [--out FILE] [--check]

The programs are in benchmarks/peers, at most 60 lines each: the same batch sizes, local steps and numbers of gradients
and products, the same data type, XLA's own settings for both; with --cores the library's own for it, as its commands
have them (`fb.tune_cpu()`). Each measurement is a process of its own, the library's
and the peer's in turn; XLA's cache on disk is off. Printed are medians over the passes:

first    processor seconds of the first call: tracing, compilation and the rounds
second   the same of a second call, with other step sizes and another seed; and how often the user's loss
         is traced in a third one
round    milliseconds of a round once everything is compiled, by the wall clock
memory   peak of the process in MB, everything that it imports included; on a GPU, of the device

--check compares iterates after 12 rounds of full batches, in float64, in place of measuring anything.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from machine import describe, peak_mb
from peers import afbo, fednest, fism, lfednest, problems, rabo, simfbo

CAPACITIES = (1.0, 0.5, 0.25, 0.125, 0.0625)
Play = Callable[[float, int, int], Any]
"""(factor on all step sizes, seed, rounds) -> (x, y)."""


@dataclass(frozen=True)
class Setting:
    """A row: the numbers that library and peer have in common."""

    kind: str
    rounds: int  # of the first and second call
    timed: int  # of each of five further calls, or rows of the history
    data: dict[str, Any]
    steps: tuple[float, ...]
    local_steps: int = 5
    batch: int | None = 32
    terms: int = 20
    random: bool = False
    cohort: int | None = None
    one_by_one: bool = False


MNIST: dict[str, Any] = {
    "rounds": 10,
    "timed": 10,
    "data": {"task": "images"},
    "batch": 64,
    "cohort": 10,
    "one_by_one": True,
}
TINY: dict[str, Any] = {"rounds": 50, "timed": 500, "data": {"task": "quadratic", "clients": 6}}
SMALL: dict[str, dict[str, Any]] = {
    "images": {"clients": 10, "samples": 8, "pixels": 12, "hidden": 16, "classes": 4},
    "quadratic": {"samples": (8, 8)},
    "location": {"targets": 43},
}
CHECKED = 12  # rounds of --check
FIRST = 3  # answers that AFBO waits for
CLOCK = [1.0 + 0.37 * i for i in range(18)]  # seconds that the clients take to answer
ROWS = {
    "simfbo-quadratic-6": Setting("simfbo", steps=(0.01, 0.1, 0.1, 0.01, 0.1, 0.1), **TINY),
    "simfbo-quadratic-10000": Setting(
        "simfbo", 50, 50, {"task": "quadratic", "clients": 10_000}, (0.01, 0.1, 0.1, 0.01, 0.1, 0.1), cohort=100
    ),
    "simfbo-mnist": Setting("simfbo", steps=(0.03, 0.1, 0.1, 0.05, 0.1, 0.1), local_steps=10, **MNIST),
    "fednest-quadratic-6": Setting("fednest", steps=(0.5, 0.5, 0.1), **TINY),
    "fednest-mnist": Setting("fednest", steps=(2.5, 0.02, 0.05), local_steps=25, terms=5, random=True, **MNIST),
    "lfednest-mnist": Setting("lfednest", steps=(2.5, 0.02, 0.05), local_steps=25, terms=5, random=True, **MNIST),
    "afbo-quadratic-18": Setting(
        "afbo", 50, 500, {"task": "quadratic", "clients": 18}, (0.01, 0.5, 0.5, 0.1), terms=5
    ),
    "fism-location": Setting("fism", 50, 5000, {"task": "location"}, (1.0, 0.6, 0.05, 0.35)),
    **{
        f"{kind}-{name}": Setting(kind, **{**MNIST, **changed, **rest})
        for name, changed in {
            "mnist-100": {"rounds": 2, "timed": 2, "cohort": 100, "one_by_one": False},
            "cnn": {"rounds": 2, "timed": 1, "data": {"task": "images", "network": "cnn"}},
            "transformer": {"rounds": 2, "timed": 1, "data": {"task": "images", "network": "transformer"}},
        }.items()
        for kind, rest in {
            "simfbo": {"steps": (0.03, 0.1, 0.1, 0.05, 0.1, 0.1), "local_steps": 10},
            "fednest": {"steps": (2.5, 0.02, 0.05), "local_steps": 25, "terms": 5, "random": True},
        }.items()
    },
    "rabo-five-capacities": Setting(
        "rabo", 50, 20, {"task": "images", "clients": 10, "samples": 100, "pixels": 64, "hidden": 512},
        (0.1, 0.05, 0.1), terms=5,
    ),
}  # fmt: skip


def problem_of(s: Setting, dtype: Any) -> Any:
    return getattr(problems, s.data["task"])(**{k: v for k, v in s.data.items() if k != "task"}, dtype=dtype)


def hand_written(s: Setting, p: Any) -> Play:
    """The peer of a row."""
    shared = {"local_steps": s.local_steps, "batch_size": s.batch}
    alone = s.one_by_one and jax.default_backend() == "cpu"  # where one client's products fill the processor
    asking = {"cohort": s.cohort, "one_by_one": alone}
    nested = {**shared, "terms": s.terms}
    if s.kind == "fism":
        run = fism.program(p)
        data = jax.tree.map(jnp.asarray, (p.data, p.mask))
        steps = s.steps[1:]
        return lambda scale, _, rounds: jax.block_until_ready(
            run((p.x, p.x), *data, (s.steps[0] * scale, *steps), None, rounds)
        )
    data, start = jax.tree.map(jnp.asarray, (p.data, p.weights)), (p.x, p.y)
    if s.kind == "rabo":
        each = len(p.weights) // len(CAPACITIES)
        classes = [slice(i * each, (i + 1) * each) for i in range(len(CAPACITIES))]
        data = tuple([jax.tree.map(lambda a, c=c: a[c], part) for c in classes] for part in data)
        kept = [int(c * s.data["hidden"]) for c in CAPACITIES]
        run = rabo.program(p, kept=kept, **nested)
    elif s.kind == "afbo":
        run = afbo.program(p, wait_for=FIRST, **nested)
    elif s.kind == "simfbo":
        run, start = simfbo.program(p, **shared, **asking), (p.x, p.y, jax.tree.map(jnp.zeros_like, p.y))
    else:
        run = {"fednest": fednest, "lfednest": lfednest}[s.kind].program(p, random=s.random, **nested, **asking)

    def play(scale: float, seed: int, rounds: int) -> Any:
        steps: Any = tuple(scale * step for step in s.steps)
        if s.kind == "simfbo":
            steps = steps[:3], steps[3:], 1e30
        elif s.kind == "afbo":
            steps = *steps, jnp.asarray(np.round(np.array(CLOCK) * 1e4).astype(np.int32))
        return run(start, *data, steps, jax.random.key(seed), rounds)[:2]

    return lambda scale, seed, rounds: jax.block_until_ready(play(scale, seed, rounds))


def of_library(s: Setting, p: Any) -> tuple[Callable[..., Any], Play]:
    """(solve, the same as a play) of a row."""
    import fedbilevel as fb

    engine, capacity = None, None
    if s.kind == "fism":
        rows = jax.tree.map(np.asarray, p.data)
        clients = fb.Clients(fb_rows(rows, p.sizes), weights="size")
        problem: Any = fb.SimpleBilevel(p.outer, p.inner, p.project, strong_convexity=1.0)
    else:
        structure = None
        if s.kind == "rabo":
            capacity = np.repeat(CAPACITIES, len(p.weights) // len(CAPACITIES))
            body = [{"weight": "_ hidden", "bias": "hidden"}]
            structure = fb.Structure(body, {"weight": "hidden _", "bias": "_"})
        problem = fb.Bilevel(p.outer, p.inner, structure=structure) if structure else fb.Bilevel(p.outer, p.inner)
        sizes = {"outer_sizes": p.data["outer_size"], "inner_sizes": p.data["inner_size"]}
        clients = fb.Clients(p.data["outer"], p.data["inner"], weights=p.weights, capacity=capacity, **sizes)
    if s.kind == "afbo":
        engine = fb.Local(clock=fb.Clock(network=CLOCK))

    def solve(scale: float, seed: int, rounds: int, **options: Any) -> Any:
        given = problem, clients, p.x, *(() if s.kind == "fism" else (p.y,))
        return fb.solve(algorithm(s, scale), *given, rounds=rounds, cohort=s.cohort, key=seed, engine=engine, **options)

    def play(scale: float, seed: int, rounds: int) -> Any:
        result = solve(scale, seed, rounds)
        return result.x, result.y

    return solve, play


def algorithm(s: Setting, scale: float) -> Any:
    """The library's method of a row."""
    import fedbilevel as fb

    t = [scale * step for step in s.steps]
    walk: Any = {"local_steps": s.local_steps}
    if s.kind == "simfbo":
        return fb.SimFBO(batch_size=s.batch, client_lr=fb.XYV(*t[:3]), server_lr=fb.XYV(*t[3:]), **walk)
    if s.kind == "fism":
        _, a, weight, b = s.steps
        return fb.FISM(lr=t[0], lr_decay=a, regularization=weight, regularization_decay=b)
    solver = fb.parts.Neumann(terms=s.terms, step=t[-2], sampling="random" if s.random else None)
    rest = {"batch_size": s.batch, "outer_lr": t[-1]}
    if s.kind == "fednest":
        shared = fb.parts.Implicit(solver=solver, fresh_cohorts=False)
        return fb.FedNest(inner=fb.parts.SVRG(lr=t[0], **walk), hypergradient=shared, **rest)
    own = fb.parts.LocalImplicit(solver=solver)
    if s.kind == "afbo":
        inner = fb.parts.MeanGradient(client_lr=t[0], lr=t[1], **walk)
        return fb.Asynchronous(fb.AFBO(inner=inner, hypergradient=own, **rest), wait_for=FIRST)
    kind = {"lfednest": fb.LFedNest, "rabo": fb.RABO}[s.kind]
    return kind(inner=fb.parts.LocalSGD(lr=t[0], **walk), hypergradient=own, **rest)


def fb_rows(rows: Any, sizes: np.ndarray) -> list[Any]:
    """One entry a client, of their own lengths."""
    return [{name: a[i, :n] for name, a in rows.items()} for i, n in enumerate(sizes)]


def measure(name: str, who: str, cores: bool) -> dict[str, Any]:
    """One contender, in this process."""
    s = ROWS[name]
    if cores and who == "library":
        import fedbilevel as fb

        fb.tune_cpu()
    jax.config.update("jax_enable_compilation_cache", False)
    p = problem_of(s, np.float32)
    if who == "library":
        solve, play = of_library(s, p)
    else:
        play = hand_written(s, p)
    out: dict[str, Any] = {}
    for call, (scale, seed) in {"first": (1.0, 0), "second": (0.9, 1)}.items():
        began = processor_seconds()
        play(scale, seed, s.rounds)
        out[call] = processor_seconds() - began
    out["traces"] = traces(p.inner if s.kind == "fism" else p.outer, lambda: play(0.8, 2, s.rounds))
    if who == "library":
        seconds = solve(1.0, 0, 6 * s.timed, eval_every=s.timed).history["seconds"]
        each = np.diff(np.asarray(seconds, float))[1:] / s.timed  # the first stretch warms up
    else:
        each = [timed(play, s.timed) for _ in range(5)]
    out["round_ms"] = 1e3 * float(np.median(each))
    out["memory_mb"] = peak_mb()
    return out


def traces(loss: Callable[..., Any], call: Callable[[], Any]) -> int:
    """How often a call runs a loss in Python; watched from outside, as a loss that counts is another each time."""
    count = 0

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is loss.__code__

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def timed(play: Play, rounds: int) -> float:
    began = time.perf_counter()
    play(1.0, 0, rounds)
    return (time.perf_counter() - began) / rounds


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def compared(name: str) -> tuple[float, float]:
    """How far apart library and peer are after rounds of full batches with everyone, in float64; how far they went.

    Wants jax_enable_x64. Sizes are small ones, so that it takes seconds.
    """
    s = ROWS[name]
    small = dict(SMALL[s.data["task"]])
    if "network" in s.data:
        small |= {"network": s.data["network"], "pixels": 784}
    if "clients" in s.data and s.data["task"] == "quadratic":
        small["clients"] = min(s.data["clients"], 18)
    s = replace(s, data={"task": s.data["task"], **small}, batch=None, cohort=None, random=False)
    p = problem_of(s, np.float64)
    ours, theirs = of_library(s, p)[1](1.0, 0, CHECKED), hand_written(s, p)(1.0, 0, CHECKED)
    return difference(ours, theirs), difference(theirs, (p.x, p.x if s.kind == "fism" else p.y))


def difference(a: Any, b: Any) -> float:
    """The largest difference of two trees, relative to the largest entry."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(jnp.abs(u - v)) / jnp.maximum(jnp.max(jnp.abs(v)), 1)) for u, v in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="write the table here as well, and every measurement beside it as JSON"
    )
    parser.add_argument("--cores", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--contender", choices=("library", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        jax.config.update("jax_enable_x64", True)
        for name in options.rows:
            print("{:24s} apart {:.1e} after a way of {:.1e}".format(name, *compared(name)), flush=True)
        return
    if options.contender:
        print(json.dumps(measure(options.rows[0], options.contender, options.cores)))
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    lines = [describe(), f"load {load()} at the start", "", *HEAD]
    print("\n".join(lines), flush=True)
    for name in options.rows:
        row = found.setdefault(name, {"library": [], "peer": []})
        for _ in range(options.passes):
            for who, passes in row.items():
                passes.append(once(name, who, options.cores))
        lines.append(line(name, row))
        print(lines[-1], flush=True)
    lines += ["", f"load {load()} at the end"]
    print("\n".join(lines[-2:]))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
        options.out.with_suffix(".json").write_text(json.dumps(found, indent=1))


HEAD = [
    "| row | first, s: library, peer, ratio | second, s: library, peer, ratio; traces | "
    "round, ms: library, peer, ratio | memory, MB: library, peer, ratio |",
    "|---|---|---|---|---|",
]


def line(name: str, row: dict[str, list[dict[str, Any]]]) -> str:
    """A row of the table: medians, and their ratio."""

    def pair(key: str, form: str) -> str:
        ours, theirs = (statistics.median(one[key] for one in row[who]) for who in ("library", "peer"))
        return f"{ours:{form}}, {theirs:{form}}, **{ours / theirs:.2f}**"

    traces = "{}, {}".format(*(max(one["traces"] for one in row[who]) for who in ("library", "peer")))
    return (
        f"| {name} | {pair('first', '.2f')} | {pair('second', '.3f')}; {traces} | "
        f"{pair('round_ms', '.3f')} | {pair('memory_mb', '.0f')} |"
    )


def load() -> str:
    return ", ".join(f"{one:.1f}" for one in os.getloadavg())


def once(name: str, who: str, cores: bool) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, "--rows", name, "--contender", who, *["--cores"] * cores]
    with tempfile.TemporaryDirectory() as home:  # no cache of anybody's
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": home, "JAX_ENABLE_COMPILATION_CACHE": "false"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
