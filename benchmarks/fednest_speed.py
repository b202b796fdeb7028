"""FedNest and LFedNest: seconds per epoch against a serial PyTorch loop and the machine's matrix-product rate.

    python -m venv .venv-torch && .venv-torch/bin/pip install torch==2.13.0 numpy
    python benchmarks/fednest_speed.py --torch .venv-torch/bin/python

The population of speed.py: model 784-200-10 (x: hidden layer, y: head), 100 clients with 300 + 300 samples, cohort 10,
float32. The setting of FedNest's published scripts: one inner round of τ = 25 steps, batch 64, N = 5, one outer step.
Every contender runs in a process of its own, in turns; so does NumPy's matrix product. All loops get the same cohorts,
batches and lengths N' of the product, and must end at the same numbers.

Work counted: the least that the products with the first layer can be: forward once for each training sample of the
cohort and once for each validation batch, backward for the two batches that the hypergradient is made of, 2·784·200
FLOP a sample. Batch by batch it is about four times as much. The peer is timed both ways, on one thread and on two; the
ratios are to its fastest way.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from speed import BATCH, CLIENTS, COHORT, ENGINES, HIDDEN, PIXELS, RIDGE, SAMPLES, build, once

TAU, TERMS, METHODS = 25, 5, ("FedNest", "LFedNest")
INNER_LR, OUTER_LR, NEUMANN_STEP = 2.5, 0.05, 0.02
PEERS = {"batch by batch": [], "units ahead": ["--ahead"]}
CHECKED_EPOCHS, TIMED_EPOCHS, PASSES = 3, 20, 5


def algorithm(method: str):
    """One of the two, in the published setting."""
    import fedbilevel as fb

    solver = fb.parts.Neumann(terms=TERMS, step=NEUMANN_STEP, sampling="random")
    inner, hypergradient = {
        "FedNest": (fb.parts.SVRG, fb.parts.Implicit(solver=solver, fresh_cohorts=False)),
        "LFedNest": (fb.parts.LocalSGD, fb.parts.LocalImplicit(solver=solver)),
    }[method]
    return getattr(fb, method)(
        inner=inner(rounds=1, local_steps=TAU, lr=INNER_LR),
        hypergradient=hypergradient,
        outer_lr=OUTER_LR,
        outer_steps=1,
        batch_size=BATCH,
    )


def draws(method: str, epochs: int) -> dict[str, np.ndarray]:
    """Cohorts, batches and lengths of the product as the engine and the phases draw them, as the peer's arrays."""
    import jax
    import jax.numpy as jnp

    from fedbilevel.engines.engine import draw_cohort, round_keys

    of_client = {"FedNest": fednest_draws, "LFedNest": lfednest_draws}[method]

    def epoch(r):
        keys = round_keys(jax.random.key(0), r)
        cohort = draw_cohort(keys.cohort, CLIENTS, COHORT)
        inner, outer = jax.random.split(keys.algorithm)
        inner = jax.random.fold_in(inner, 0)  # the only inner round
        return {"cohorts": cohort, **jax.vmap(lambda client: of_client(client, inner, outer))(cohort)}

    return {name: np.asarray(index) for name, index in jax.vmap(epoch)(jnp.arange(epochs)).items()}


def batch(key):
    """Indices of one draw."""
    from fedbilevel.machinery.threefry import uniform_below

    return uniform_below(key, SAMPLES, (BATCH,))


def folded(key, numbers):
    """Indices of a draw for each number folded into the key."""
    import jax

    return jax.vmap(lambda n: batch(jax.random.fold_in(key, n)))(np.asarray(numbers))


def fednest_draws(client, inner, outer) -> dict:
    """A client's share of an epoch of FedNest: the keys of its exchanges, with the client's number folded in."""
    import jax
    from jax.random import fold_in, split

    from fedbilevel.machinery.threefry import uniform_below

    anchor, descent = split(inner)
    start, system, last = split(split(outer)[0], 3)
    length, products = split(system)
    hyper_outer, hyper_inner = split(fold_in(last, client))
    return {
        "anchor_batches": batch(fold_in(anchor, client)),
        "inner_batches": folded(fold_in(descent, client), range(1, TAU)),  # the first step draws nothing
        "start_batches": batch(fold_in(start, client)),
        "lengths": uniform_below(length, TERMS),
        "product_batches": jax.vmap(lambda n: batch(fold_in(fold_in(products, n), client)))(np.arange(TERMS - 1)),
        "hyper_outer_batches": batch(hyper_outer),
        "hyper_inner_batches": batch(hyper_inner),
    }


def lfednest_draws(client, inner, outer) -> dict:
    """A client's share of an epoch of LFedNest: two exchanges, in the second everything for x."""
    from jax.random import fold_in, split

    from fedbilevel.machinery.threefry import uniform_below

    hyper_outer, system, hyper_inner = split(fold_in(fold_in(outer, client), 0), 3)
    length, products = split(system)
    return {
        "inner_batches": folded(fold_in(inner, client), range(TAU)),
        "lengths": uniform_below(length, TERMS),
        "product_batches": folded(products, range(TERMS - 1)),
        "hyper_outer_batches": batch(hyper_outer),
        "hyper_inner_batches": batch(hyper_inner),
    }


def write_problem(method: str, path: Path) -> None:
    """The same start, data and draws as the engine's, for the peer."""
    _, _, clients, x0, y0 = build()
    sets = {"inner": clients.inner.values, "outer": clients.outer.values}
    np.savez(
        path,
        x_w=x0[0]["weight"], x_b=x0[0]["bias"], y_w=y0["weight"], y_b=y0["bias"],
        inner_lr=INNER_LR, outer_lr=OUTER_LR, neumann_step=NEUMANN_STEP, neumann_terms=TERMS, ridge=RIDGE,
        checked=CHECKED_EPOCHS, **draws(method, CHECKED_EPOCHS + TIMED_EPOCHS),
        **{f"{s}_images": v["image"].reshape(CLIENTS, SAMPLES, PIXELS) for s, v in sets.items()},
        **{f"{s}_labels": v["label"].reshape(CLIENTS, SAMPLES) for s, v in sets.items()},
    )  # fmt: skip


def run_engine(method: str, name: str, result: Path) -> None:
    """One contender of ours, in this process: seconds per epoch, and where it stands after a few."""
    import fedbilevel as fb

    devices, tuned = ENGINES[name]
    if tuned:
        fb.tune_cpu(devices)
    _, *arguments = build()
    ends = {}

    def keep(so_far, row) -> None:
        if so_far.round == CHECKED_EPOCHS:
            ends.update(x_w=so_far.x[0]["weight"], y_w=so_far.y["weight"])

    run = fb.solve(
        algorithm(method), *arguments, rounds=CHECKED_EPOCHS + TIMED_EPOCHS, cohort=COHORT,
        engine=fb.Local(devices=devices), eval_every=1, callbacks=[keep],
    )  # fmt: skip
    each = np.diff(run.history["seconds"])[CHECKED_EPOCHS:]
    np.savez(result, **ends, seconds_per_round=[each.mean()], compiling=run.compile_seconds)


def contend(method: str, torch: str, passes: int, folder: Path) -> tuple[dict, dict, list[float]]:
    """Seconds per epoch and last result by contender, and the machine's rates in between."""
    from machine import gemm_rate

    here, problem, result = [sys.executable, __file__, "--method", method], folder / "problem.npz", folder / "out.npz"
    subprocess.run([*here, "--write", str(problem)], check=True)
    contenders = {name: [*here, "--engine", name, "--result", str(result)] for name in ENGINES}
    peer = [torch, str(Path(__file__).with_name("peer_torch_fednest.py")), str(problem), str(result), "--repeats", "1"]
    for threads in (1, 2):
        for name, option in PEERS.items():
            contenders[f"PyTorch, {name}, threads={threads}"] = [*peer, *option, "--threads", str(threads)]
    found: dict[str, list[float]] = {name: [] for name in contenders}
    ends, rates = {}, []
    for _ in range(passes):
        rates.append(gemm_rate())
        for name, command in contenders.items():
            ends[name] = once(command, result)
            found[name].extend(ends[name]["seconds_per_round"].tolist())
    rates.append(gemm_rate())
    with np.load(problem) as stored:
        ends["start"] = {"x_w": stored["x_w"], "y_w": stored["y_w"], "lengths": stored["lengths"][CHECKED_EPOCHS:]}
    return found, ends, rates


def report(method: str, found: dict[str, list[float]], ends: dict, rates: list[float]) -> None:
    """The table of one method."""
    peak, length = max(rates), float(ends["start"]["lengths"].mean())
    samples = SAMPLES + BATCH * (4 if method == "FedNest" else 3)
    flop = COHORT * samples * 2 * PIXELS * HIDDEN
    print(f"{method}: mean N' = {length:.2f} in the epochs timed; at least {flop / 1e9:.2f} GFLOP an epoch")
    print(f"NumPy float32 1024³: best {peak:.0f} GFLOP/s, passes {', '.join(f'{r:.0f}' for r in rates)}")
    torch = min((v for k, v in found.items() if k.startswith("PyTorch")), key=min)
    print(f"{'':38s}  ms/epoch: best  median   GFLOP/s   of peak   × PyTorch (best, median)")
    for name, seconds in found.items():
        best, median = min(seconds), float(np.median(seconds))
        rate = flop / best / 1e9
        ratio = f"{min(torch) / best:8.2f} {np.median(torch) / median:8.2f}"
        print(f"{name:38s} {1e3 * best:15.1f} {1e3 * median:7.1f} {rate:9.0f} {rate / peak:9.2f}  {ratio}")
    ours = ends[next(iter(ENGINES))]
    for name, end in ends.items():
        gap = max(float(np.max(np.abs(end[k] - ours[k]))) for k in ("x_w", "y_w"))
        print(f"{name}: within {gap:.1e} of where the first row is after {CHECKED_EPOCHS} epochs (float32)")
    print(json.dumps({"method": method, "peak_gflops": peak, "ms": {k: 1e3 * min(v) for k, v in found.items()}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="a Python that has torch")
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--method", choices=METHODS, help="that one alone")
    parser.add_argument("--engine", choices=sorted(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(options.method, options.engine, options.result)
        return
    if options.write:
        write_problem(options.method, options.write)
        return
    if not options.torch:
        parser.error("--torch is missing: what is compared with is PyTorch")

    from machine import describe

    print(describe())
    for method in [options.method] if options.method else METHODS:
        with tempfile.TemporaryDirectory() as folder:
            report(method, *contend(method, options.torch, options.passes, Path(folder)))


if __name__ == "__main__":
    main()
