"""SimFBO, FedNest and LFedNest compared with serial PyTorch loops, and with the machine's rate of matrix products.

The settings are the rows simfbo-mnist, fednest-mnist and lfednest-mnist of floor.py: a model 784-200-10 (x is the
hidden layer, y the head), 100 clients with 300 + 300 samples, cohorts of 10, batches of 64, float32. SimFBO has τ = 10;
the others have the setting of FedNest's published scripts, with one inner round of τ = 25 steps, N = 5, and one outer
step. Every contender, and NumPy's matrix product, is a process of its own, measured in turn. All contenders get the
same cohorts, batches and lengths N' of the product, and must end at the same numbers. PyTorch is installed in
`.venv-peers/torch` the first time.

The counted work of SimFBO is the matrix products that every formulation needs: forward and backward through the first
layer for each of the two losses, 4 · 2·64·784·200 FLOP, and as many through the head. The counted work of the others is
the least possible number of products with the first layer: forward once for each training sample of the cohort and once
for each validation batch, and backward for the two batches of the hypergradient, with 2·784·200 FLOP per sample.
"""

import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.random import fold_in, split

import fedbilevel as fb
from benchmarks import floor
from benchmarks.contest import python_with
from benchmarks.harness import head, in_process, row, turns
from benchmarks.machine import gemm_rate
from fedbilevel.engines.engine import draw_cohort, round_keys
from fedbilevel.machinery.threefry import uniform_below

ENGINES = {"XLA's defaults": (1, False), "tune_cpu(1)": (1, True), "tune_cpu(2)": (2, True)}  # name: (devices, tuned)
THREADS = {"simfbo": ("",), "fednest": ("1", "2"), "lfednest": ("1", "2")}  # PyTorch's threads; "": its own choice
CHECKED = 3  # the number of rounds after which all must have the same numbers
APART = 1e-4  # the largest allowed difference in float32; a round moves entries by 1e-2
SAMPLES, CLIENTS, PIXELS, HIDDEN, CLASSES = 300, 100, 784, 200, 10
QUICK = {"methods": ["simfbo"], "passes": 1, "timed": 2}


def setting(method: str) -> floor.Setting:
    return floor.ROWS[f"{method}-mnist"]


def library(method: str, engine: str, timed: int, result: str) -> float:
    """Measure the library in this process, in milliseconds per round.

    Write its numbers after a few rounds to a file.
    """
    devices, tuned = ENGINES[engine]
    if tuned:
        fb.tune_cpu(devices)
    solve, _ = floor.of_library(setting(method), floor.problem_of(setting(method), np.float32))
    few = solve(1.0, 0, CHECKED, engine=fb.Local(devices=devices))
    many = solve(1.0, 0, 3 * timed, engine=fb.Local(devices=devices), eval_every=timed)
    v = {"v_w": few.state.iterate.v["weight"]} if method == "simfbo" else {}
    np.savez(result, x_w=few.x[0]["weight"], y_w=few.y["weight"], **v)
    return 1e3 * float(np.diff(many.history["seconds"])[1:].mean()) / timed  # the first stretch warms up


def batch(key: Any) -> Any:
    """Return the indices of one draw."""
    return uniform_below(key, SAMPLES, (64,))


def folded(key: Any, numbers: Any) -> Any:
    """Return the indices of a draw for each of some numbers, which are folded into the key."""
    return jax.vmap(lambda n: batch(fold_in(key, n)))(np.asarray(numbers))


def simfbo_draws(s: floor.Setting, client: Any, key: Any) -> dict[str, Any]:
    """Return the random draws of a client in a round of SimFBO."""
    pairs = jax.vmap(lambda k: split(fold_in(fold_in(key, client), k)))(np.arange(s.local_steps))
    batches = jax.vmap(jax.vmap(batch))(pairs)
    return {"outer_batches": batches[:, 0], "inner_batches": batches[:, 1]}


def fednest_draws(s: floor.Setting, client: Any, key: Any) -> dict[str, Any]:
    """Return the random draws of a client in a round of FedNest.

    The client's number is folded into the keys of the exchanges.
    """
    inner, outer = split(key)
    anchor, descent = split(fold_in(inner, 0))  # the keys of the only inner round
    start, system, last = split(split(outer)[0], 3)
    length, products = split(system)
    hyper_outer, hyper_inner = split(fold_in(last, client))
    return {
        "anchor_batches": batch(fold_in(anchor, client)),
        "inner_batches": folded(fold_in(descent, client), range(1, s.local_steps)),  # the first step draws nothing
        "start_batches": batch(fold_in(start, client)),
        "lengths": uniform_below(length, s.terms),
        "product_batches": jax.vmap(lambda n: batch(fold_in(fold_in(products, n), client)))(np.arange(s.terms - 1)),
        "hyper_outer_batches": batch(hyper_outer),
        "hyper_inner_batches": batch(hyper_inner),
    }


def lfednest_draws(s: floor.Setting, client: Any, key: Any) -> dict[str, Any]:
    """Return the random draws of a client in a round of LFedNest.

    A round has two exchanges; the second has all draws for x.
    """
    inner, outer = split(key)
    hyper_outer, system, hyper_inner = split(fold_in(fold_in(outer, client), 0), 3)
    length, products = split(system)
    return {
        "inner_batches": folded(fold_in(fold_in(inner, 0), client), range(s.local_steps)),
        "lengths": uniform_below(length, s.terms),
        "product_batches": folded(products, range(s.terms - 1)),
        "hyper_outer_batches": batch(hyper_outer),
        "hyper_inner_batches": batch(hyper_inner),
    }


DRAWS = {"simfbo": simfbo_draws, "fednest": fednest_draws, "lfednest": lfednest_draws}


def write_problem(method: str, timed: int, file: str) -> None:
    """Write the start, the data and the draws of the library in the form that torch_loops.py reads."""
    s = setting(method)
    p = floor.problem_of(s, np.float32)

    def draws(r: Any) -> dict[str, Any]:
        keys = round_keys(jax.random.key(0), r)
        cohort = draw_cohort(keys.cohort, CLIENTS, s.cohort)
        return {"cohorts": cohort, **jax.vmap(lambda client: DRAWS[method](s, client, keys.algorithm))(cohort)}

    data = {f"{name}_{key}s": a for name in ("inner", "outer") for key, a in p.data[name].items()}
    start = {"x_w": p.x[0]["weight"], "x_b": p.x[0]["bias"], "y_w": p.y["weight"], "y_b": p.y["bias"]}
    numbers = {"steps": s.steps, "terms": s.terms, "ridge": 5e-4, "checked": CHECKED}
    np.savez(file, **data, **start, **numbers, **jax.vmap(draws)(jnp.arange(CHECKED + timed)))


def peer(python: str, problem: str, threads: str, result: str) -> float:
    """Measure PyTorch, in milliseconds per round."""
    command = [python, str(Path(__file__).with_name("torch_loops.py")), problem, result, *filter(None, [threads])]
    subprocess.run(command, check=True)
    return float(np.load(result)["ms"])


def flop(s: floor.Setting) -> float:
    """Return the counted floating-point operations of a round: see the docstring of the module."""
    if s.kind == "simfbo":
        return s.cohort * s.local_steps * 4 * 2 * s.batch * HIDDEN * (PIXELS + CLASSES)
    return s.cohort * (SAMPLES + s.batch * (4 if s.kind == "fednest" else 3)) * 2 * PIXELS * HIDDEN


def compare(method: str, passes: int, timed: int, folder: Path) -> None:
    """Measure all contenders for one method, and print the table."""
    problem, ends = str(folder / "problem.npz"), {}
    in_process(write_problem, method, timed, problem)
    contenders: dict[str, Any] = {"NumPy": gemm_rate}
    for engine in ENGINES:
        ends[engine] = str(folder / f"{engine}.npz")
        contenders[engine] = partial(in_process, library, method, engine, timed, ends[engine])
    for threads in THREADS[method]:
        name = f"PyTorch, threads={threads}" if threads else "PyTorch"
        ends[name] = str(folder / f"{name}.npz")
        contenders[name] = partial(peer, python_with("torch"), problem, threads, ends[name])
    measured = turns(contenders, passes)
    rates = measured.pop("NumPy")
    print(f"\n{method}: NumPy float32 1024³ {', '.join(f'{rate:.0f}' for rate in rates)} GFLOP/s")
    torch = min((ms for name, ms in measured.items() if name.startswith("PyTorch")), key=min)
    columns = "ms a round: least", "median", "GFLOP/s", "of NumPy's best", "× PyTorch: least", "median"
    head("contender", *columns, f"apart after {CHECKED} rounds")
    ours = np.load(ends["XLA's defaults"])
    for name, ms in measured.items():
        end, middle, rate = np.load(ends[name]), float(np.median(ms)), flop(setting(method)) / min(ms) / 1e6
        apart = max(float(np.max(np.abs(end[key] - ours[key]))) for key in ours.files)
        cells = f"{min(ms):.1f}", f"{middle:.1f}", f"{rate:.0f}", f"{rate / max(rates):.2f}"
        row(name, *cells, f"{min(torch) / min(ms):.2f}", f"{np.median(torch) / middle:.2f}", f"{apart:.1e}")
        assert apart < APART, f"{name} does not compute what the library does"


def main(methods: tuple[str, ...] = tuple(DRAWS), passes: int = 3, timed: int = 20) -> None:
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            compare(method, passes, timed, Path(folder))
