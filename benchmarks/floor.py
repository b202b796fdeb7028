"""The library compared with hand-written JAX programs of the same mathematics: first and second call, rounds, memory.

The programs are in benchmarks/peers, with at most 60 lines each. They have the same batch sizes, local steps, numbers
of gradients and products, and data type. XLA has its default settings for both; with --cores, the library has the
settings of its commands (`fb.tune_cpu()`). Each measurement is a process of its own, for the library and the peer in
turn. XLA's cache on disk is off. The table has medians over the passes (library, peer, ratio):

first    processor seconds of the first call: tracing, compilation and the rounds
second   processor seconds of a second call, with other step sizes and another seed
round    milliseconds of a round once everything is compiled, by the clock
memory   peak of the process in MB, everything that it imports included; on a GPU, of the device

With --torch, the rows simfbo-mnist, fednest-mnist and lfednest-mnist are compared with serial PyTorch loops
(torch_loops.py), and with the machine's rate of matrix products. FedNest and LFedNest have the setting of FedNest's
published scripts. Every contender, and NumPy's matrix product, is a process of its own, measured in turn. First, the
library and PyTorch must end at the same numbers on a small problem, in float64 and with all samples. PyTorch is
installed in `.venv-peers/torch` the first time. The counted work of SimFBO is the matrix products that every
formulation needs: forward and backward through the first layer for each of the two losses, 4 · 2·64·784·200 FLOP, and
the same products with the head, 4 · 2·64·200·10 FLOP. The counted work of the others is the least possible number of
products with the first layer: forward once for each training sample of the cohort and once for each validation batch,
and backward for the two batches of the hypergradient, with 2·784·200 FLOP per sample.

With --kernels, XLA writes every program that it compiles for the first call to files, and the table has the number of
kernels, the functions that XLA compiles to machine code, of the largest program, which contains the rounds.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from benchmarks.contest import python_with
from benchmarks.harness import head, in_process, medians, round_ms, row, seconds, turns
from benchmarks.machine import gemm_rate, peak_mb
from benchmarks.peers import afbo, fednest, fism, lfednest, problems, rabo, simfbo

QUICK = {"rows": ["simfbo-quadratic-6"], "passes": 1}
CAPACITIES = (1.0, 0.5, 0.25, 0.125, 0.0625)
Play = Callable[..., Any]
"""A function (factor of all step sizes, seed, rounds) -> a result with x and y."""


@dataclass(frozen=True)
class Setting:
    """The setting of a row of the table, which library and peer have in common."""

    kind: str
    rounds: int  # the number of rounds of the first and the second call
    timed: int  # the number of rounds of each of five further calls, or between rows of the history
    data: dict[str, Any]
    steps: tuple[float, ...]
    local_steps: int = 5
    batch: int | None = 32
    terms: int = 20
    random: bool = False
    cohort: int | None = None
    one_by_one: bool = False


TINY: dict[str, Any] = {"rounds": 50, "timed": 500, "data": {"task": "quadratic", "clients": 6}}
MANY: dict[str, Any] = {"rounds": 50, "timed": 50, "data": {"task": "quadratic", "clients": 10_000}, "cohort": 100}
IMAGES: dict[str, Any] = {"data": {"task": "images"}, "batch": 64, "cohort": 10, "one_by_one": True}
SIZES: dict[str, dict[str, Any]] = {
    "mnist": {**IMAGES, "rounds": 10, "timed": 10},
    "mnist-100": {**IMAGES, "rounds": 2, "timed": 2, "cohort": 100, "one_by_one": False},
    "cnn": {**IMAGES, "rounds": 2, "timed": 1, "data": {"task": "images", "network": "cnn"}},
    "transformer": {**IMAGES, "rounds": 2, "timed": 1, "data": {"task": "images", "network": "transformer"}},
}
STEPS = (0.01, 0.1, 0.1, 0.01, 0.1, 0.1)
LONG: dict[str, Any] = {"steps": (0.03, 0.1, 0.1, 0.05, 0.1, 0.1), "local_steps": 10}
NESTED: dict[str, Any] = {"steps": (2.5, 0.02, 0.05), "local_steps": 25, "terms": 5, "random": True}
SMALL: dict[str, dict[str, Any]] = {
    "images": {"clients": 10, "samples": 8, "pixels": 12, "hidden": 16, "classes": 4},
    "quadratic": {"samples": (8, 8)},
    "location": {"targets": 43},
}
CHECKED = 12  # the number of rounds after which `compared` compares iterates
RADIUS = 1e30  # of v: it is never reached
PEERS = {"simfbo": simfbo, "fednest": fednest, "lfednest": lfednest, "afbo": afbo, "rabo": rabo, "fism": fism}
FIRST = 3  # the number of answers for which AFBO waits
CLOCK = [1.0 + 0.37 * i for i in range(18)]  # the seconds that clients need for an answer
ROWS = {
    "simfbo-quadratic-6": Setting("simfbo", steps=STEPS, **TINY),
    "simfbo-quadratic-10000": Setting("simfbo", steps=STEPS, **MANY),
    "fednest-quadratic-6": Setting("fednest", steps=(0.5, 0.5, 0.1), **TINY),
    "afbo-quadratic-18": Setting(
        "afbo", 50, 500, {"task": "quadratic", "clients": 18}, (0.01, 0.5, 0.5, 0.1), terms=5
    ),
    "fism-location": Setting("fism", 50, 5000, {"task": "location"}, (1.0, 0.6, 0.05, 0.35)),
    **{f"simfbo-{name}": Setting("simfbo", **LONG, **size) for name, size in SIZES.items()},
    **{f"fednest-{name}": Setting("fednest", **NESTED, **size) for name, size in SIZES.items()},
    "lfednest-mnist": Setting("lfednest", **NESTED, **SIZES["mnist"]),
    "rabo-five-capacities": Setting(
        "rabo", 50, 20, {"task": "images", "clients": 10, "samples": 100, "pixels": 64, "hidden": 512},
        (0.1, 0.05, 0.1), terms=5,
    ),
}  # fmt: skip


def problem_of(s: Setting, dtype: Any) -> Any:
    return getattr(problems, s.data["task"])(**{k: v for k, v in s.data.items() if k != "task"}, dtype=dtype)


def steps_of(s: Setting, scale: float) -> tuple[float, ...]:
    """Return the step sizes of a row, multiplied by a factor. For SimFBO, they are followed by the radius of v."""
    if s.kind == "fism":  # the others are exponents and a penalty
        return scale * s.steps[0], *s.steps[1:]
    return *(scale * step for step in s.steps), *([RADIUS] if s.kind == "simfbo" else [])


def hand_written(s: Setting, p: Any) -> Play:
    """Return the hand-written program for a row."""
    walk = {"local_steps": s.local_steps, "batch_size": s.batch}
    nested = {**walk, "terms": s.terms}
    alone = s.one_by_one and jax.default_backend() == "cpu"  # one client's products use the whole processor
    asking = {"cohort": s.cohort, "one_by_one": alone}
    options: dict[str, Any] = {
        "simfbo": {**walk, **asking},
        "fednest": {**nested, **asking, "random": s.random},
        "lfednest": {**nested, **asking, "random": s.random},
        "afbo": {**nested, "wait_for": FIRST, "ticks": np.round(np.array(CLOCK) * 1e4).astype(np.int32)},
        "rabo": {**nested, "kept": [int(c * s.data.get("hidden", 0)) for c in CAPACITIES]},
        "fism": {},
    }
    run = PEERS[s.kind].program(p, **options[s.kind])
    data, start = jax.tree.map(jnp.asarray, (p.data, p.weights)), (p.x, p.y)
    if s.kind == "rabo":
        each = len(p.weights) // len(CAPACITIES)
        classes = [slice(i * each, (i + 1) * each) for i in range(len(CAPACITIES))]
        data = tuple([jax.tree.map(lambda a, c=c: a[c], part) for c in classes] for part in data)

    def play(scale: float, seed: int, rounds: int) -> Any:
        x, y, *_ = run(start, *data, steps_of(s, scale), jax.random.key(seed), rounds)
        return SimpleNamespace(x=jax.block_until_ready(x), y=jax.block_until_ready(y))

    return play


def of_library(s: Setting, p: Any) -> Play:
    """Return the library's program for a row, which also takes options of `fb.solve`."""
    engine = fb.Local(clock=fb.Clock(network=CLOCK)) if s.kind == "afbo" else None
    if s.kind == "fism":
        given = p.task.problem, p.task.clients, p.x
    else:
        each = len(p.weights) // len(CAPACITIES)
        capacity, structure = (np.repeat(CAPACITIES, each), p.structure) if s.kind == "rabo" else (None, None)
        sizes = {"outer_sizes": p.data["outer_size"], "inner_sizes": p.data["inner_size"]}
        clients = fb.Clients(p.data["outer"], p.data["inner"], weights=p.weights, capacity=capacity, **sizes)
        given = fb.Bilevel(p.outer, p.inner, structure=structure), clients, p.x, p.y

    def play(scale: float, seed: int, rounds: int, **options: Any) -> Any:
        options = {"engine": engine, **options}
        return fb.solve(algorithm(s, scale), *given, rounds=rounds, cohort=s.cohort, key=seed, **options)

    return play


def algorithm(s: Setting, scale: float) -> Any:
    """Return the library's method for a row."""
    t = steps_of(s, scale)
    walk: Any = {"local_steps": s.local_steps}
    if s.kind == "simfbo":
        return fb.SimFBO(batch_size=s.batch, client_lr=fb.XYV(*t[:3]), server_lr=fb.XYV(*t[3:6]), **walk)
    if s.kind == "fism":
        lr, a, weight, b = t
        return fb.FISM(lr=lr, lr_decay=a, regularization=weight, regularization_decay=b)
    solver = fb.parts.Neumann(terms=s.terms, step=t[-2], sampling="random" if s.random else None)
    rest = {"batch_size": s.batch, "outer_lr": t[-1]}
    if s.kind == "fednest":
        shared = fb.parts.Implicit(solver=solver, fresh_cohorts=False)
        return fb.FedNest(inner=fb.parts.SVRG(lr=t[0], **walk), hypergradient=shared, **rest)
    own = fb.parts.LocalImplicit(solver=solver)
    if s.kind == "afbo":
        inner = fb.parts.MeanGradient(client_lr=t[0], lr=t[1], **walk)
        return fb.Asynchronous(fb.AFBO(inner=inner, hypergradient=own, **rest), wait_for=FIRST, delay_penalty=0.0)
    kind = {"lfednest": fb.LFedNest, "rabo": fb.RABO}[s.kind]
    return kind(inner=fb.parts.LocalSGD(lr=t[0], **walk), hypergradient=own, **rest)


CONTENDERS = {"library": of_library, "peer": hand_written}


def measure(name: str, who: str, cores: bool) -> dict[str, float]:
    """Measure one contender, in this process."""
    s = ROWS[name]
    if cores and who == "library":
        fb.tune_cpu()
    play = CONTENDERS[who](s, problem_of(s, np.float32))
    out: dict[str, float] = {}
    for call, (scale, seed) in {"first": (1.0, 0), "second": (0.9, 1)}.items():
        began = process_time()
        play(scale, seed, s.rounds)
        out[call] = process_time() - began
    if who == "library":
        out["round"] = round_ms(play(1.0, 0, 6 * s.timed, eval_every=s.timed).history["seconds"], s.timed)
    else:
        out["round"] = 1e3 * median(seconds(lambda: play(1.0, 0, s.timed)) for _ in range(5)) / s.timed
    return {**out, "memory": peak_mb()}


def first_call(name: str, who: str) -> None:
    """Call one contender, in this process."""
    s = ROWS[name]
    CONTENDERS[who](s, problem_of(s, np.float32))(1.0, 0, s.rounds)


def kernels_of(name: str, who: str) -> int:
    """Return the number of kernels of one contender."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        in_process(first_call, name, who, environment={"XLA_FLAGS": flags})
        programs = Path(folder).glob("*after_optimizations.txt")
        module = max(programs, key=lambda path: path.stat().st_size).name.split(".")[0]
        return len(list(Path(folder).glob(f"{module}.*.ir-with-opt.ll")))


def small(name: str) -> Setting:
    """Return the setting of a row with full batches, all clients, and sizes with which rounds take seconds."""
    s = ROWS[name]
    data = {"task": s.data["task"], **SMALL[s.data["task"]]}
    if "network" in s.data:
        data |= {"network": s.data["network"], "pixels": 784}
    if "clients" in s.data and s.data["task"] == "quadratic":
        data["clients"] = min(s.data["clients"], 18)
    return replace(s, data=data, batch=None, cohort=None, random=False)


def compared(name: str) -> tuple[float, float]:
    """Return the distance between library and peer after rounds of full batches, and the distance from the start.

    This needs jax_enable_x64.
    """
    s = small(name)
    p = problem_of(s, np.float64)
    scale = 0.1 if "network" in s.data else 1.0  # with the few samples of `small`, networks need shorter steps
    ours, theirs = (contender(s, p)(scale, 0, CHECKED) for contender in CONTENDERS.values())
    return difference(ours, theirs), difference(theirs, p)


def difference(a: Any, b: Any) -> float:
    """Return the largest difference of x and y in two results, relative to the largest entry."""
    pairs = zip(jax.tree.leaves((a.x, a.y)), jax.tree.leaves((b.x, b.y)), strict=True)
    return max(float(jnp.max(jnp.abs(u - v)) / jnp.maximum(jnp.max(jnp.abs(v)), 1)) for u, v in pairs)


ENGINES = {"XLA's defaults": (1, False), "tune_cpu(1)": (1, True), "tune_cpu(2)": (2, True)}  # name: (devices, tuned)
THREADS = {"simfbo-mnist": ("",), "fednest-mnist": ("1", "2"), "lfednest-mnist": ("1", "2")}
"""PyTorch's numbers of threads, by row; "" is its own choice."""
APART = 1e-10  # the largest allowed difference after the rounds of the check; they move entries by 1e-3 or more
TORCH_ROUNDS = 20  # the number of timed rounds


def write(s: Setting, dtype: str, file: str) -> None:
    """Write a problem in the form that torch_loops.py reads."""
    p = problem_of(s, np.dtype(dtype))
    data = {f"{name}_{key}s": a for name in ("inner", "outer") for key, a in p.data[name].items()}
    start = {"x_w": p.x[0]["weight"], "x_b": p.x[0]["bias"], "y_w": p.y["weight"], "y_b": p.y["bias"]}
    numbers = {"local_steps": s.local_steps, "terms": s.terms, "batch_size": s.batch or 0}
    np.savez(file, **data, **start, **numbers, steps=s.steps, ridge=problems.RIDGE, cohort=s.cohort or len(p.weights))


def in_torch(s: Setting, problem: str, rounds: int, threads: str) -> dict[str, Any]:
    """Run PyTorch. Return its numbers at the end, and the milliseconds per round."""
    result = str(Path(problem).with_name("result.npz"))
    command = [python_with("torch"), str(Path(__file__).with_name("torch_loops.py")), s.kind, problem, result]
    subprocess.run([*command, str(rounds), *filter(None, [threads])], check=True)
    return dict(np.load(result))


def in_engine(name: str, engine: str, timed: int) -> float:
    """Measure the library in this process, in milliseconds per round."""
    s, (devices, tuned) = ROWS[name], ENGINES[engine]
    if tuned:
        fb.tune_cpu(devices)
    play = of_library(s, problem_of(s, np.float32))
    return round_ms(
        play(1.0, 0, 3 * timed, engine=fb.Local(devices=devices), eval_every=timed).history["seconds"], timed
    )


def write_small(name: str, problem: str) -> dict[str, Any]:
    """Write a small problem. Return the numbers at which the library ends."""
    s = small(name)
    write(s, "float64", problem)
    end = of_library(s, problem_of(s, np.float64))(1.0, 0, CHECKED)
    return {"x_w": end.x[0]["weight"].tolist(), "y_w": end.y["weight"].tolist()}


def flop(s: Setting, p: Any) -> float:
    """Return the counted floating-point operations of a round: see the docstring of the module."""
    samples, pixels = p.data["inner"]["image"].shape[1:]
    hidden, classes = p.y["weight"].shape
    if s.kind == "simfbo":
        return s.cohort * s.local_steps * 4 * 2 * s.batch * hidden * (pixels + classes)
    return s.cohort * (samples + s.batch * (4 if s.kind == "fednest" else 3)) * 2 * pixels * hidden


def beside_torch(name: str, passes: int, folder: Path) -> None:
    """Compare the numbers of the library and of PyTorch, measure all contenders, and print the table."""
    s, first, problem = ROWS[name], str(folder / "small.npz"), str(folder / "problem.npz")
    ours = in_process(write_small, name, first, environment={"JAX_ENABLE_X64": "1"})
    theirs = in_torch(s, first, CHECKED, "1")
    apart = max(float(np.max(np.abs(theirs[part] - end))) for part, end in ours.items())
    assert apart < APART, f"PyTorch does not compute what the library does: {apart}"

    write(s, "float32", problem)
    contenders: dict[str, Any] = {"NumPy": gemm_rate}
    contenders |= {engine: partial(in_process, in_engine, name, engine, TORCH_ROUNDS) for engine in ENGINES}
    for threads in THREADS[name]:
        run = partial(in_torch, s, problem, TORCH_ROUNDS, threads)
        contenders[f"PyTorch, threads={threads or 'its own choice'}"] = lambda run=run: float(run()["ms"])
    measured = turns(contenders, passes)
    rates = measured.pop("NumPy")
    print(f"\n{name}: NumPy float32 1024³ {', '.join(f'{rate:.0f}' for rate in rates)} GFLOP/s")
    print(f"PyTorch and the library end at the same numbers, up to {apart:.0e}")
    torch = min((ms for who, ms in measured.items() if who.startswith("PyTorch")), key=min)
    head("contender", "ms a round: least", "median", "GFLOP/s", "of NumPy's best", "× PyTorch: least", "median")
    work = flop(s, problem_of(s, np.float32))
    for who, ms in measured.items():
        rate = work / min(ms) / 1e6
        cells = f"{min(ms):.1f}", f"{median(ms):.1f}", f"{rate:.0f}", f"{rate / max(rates):.2f}"
        row(who, *cells, f"{min(torch) / min(ms):.2f}", f"{median(torch) / median(ms):.2f}")


FORMS = {"first": ".2f", "second": ".3f", "round": ".3f", "memory": ".0f"}


def main(
    rows: tuple[str, ...] = tuple(ROWS),
    passes: int = 3,
    cores: bool = False,
    kernels: bool = False,
    torch: bool = False,
) -> None:
    if kernels:
        head("row", "library", "by hand", "ratio")
    elif not torch:
        head("row", "first, s", "second, s", "round, ms", "memory, MB")
    for name in rows:
        if kernels:
            ours, theirs = (kernels_of(name, who) for who in CONTENDERS)
            row(name, ours, theirs, f"{ours / theirs:.2f}")
        elif torch and name in THREADS:
            with tempfile.TemporaryDirectory() as folder:
                beside_torch(name, passes, Path(folder))
        elif not torch:
            contenders = {who: partial(in_process, measure, name, who, cores) for who in CONTENDERS}
            ours, theirs = map(medians, turns(contenders, passes).values())
            pairs = [(form, ours[key], theirs[key]) for key, form in FORMS.items()]
            row(name, *(f"{a:{form}}, {b:{form}}, **{a / b:.2f}**" for form, a, b in pairs))
