"""SimFBO rounds per second against the machine's matrix-product rate and against a serial PyTorch loop.

    python -m venv .venv-torch && .venv-torch/bin/pip install torch==2.13.0 numpy
    python benchmarks/speed.py --torch .venv-torch/bin/python

Model 784-200-10 (x: hidden layer, y: head), 100 clients with 300 + 300 samples, cohort 10, τ = 10, batch 64, float32.
Every contender runs in a process of its own, in turns, several times; so does NumPy's matrix product. Both loops get
the same cohorts and batches and must end at the same numbers.

Work counted: per local step the products that no formulation can leave out, forward and backward through the first
layer for each of the two losses, 4 · 2·64·784·200 FLOP, and as many through the head.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CLIENTS, COHORT, SAMPLES, TAU, BATCH = 100, 10, 300, 10, 64
PIXELS, HIDDEN, CLASSES = 784, 200, 10
LOCAL, SERVER, RIDGE = (0.03, 0.1, 0.1), (0.05, 0.1, 0.1), 5e-4
CHECKED_ROUNDS, TIMED_ROUNDS, PASSES = 3, 30, 5
FLOP = COHORT * TAU * 4 * 2 * BATCH * HIDDEN * (PIXELS + CLASSES)

ENGINES = {  # name: (devices, tuned)
    "fedbilevel, XLA's defaults": (1, False),
    "fedbilevel, tune_cpu(1)": (1, True),
    "fedbilevel, tune_cpu(2), devices=2": (2, True),
}


def build() -> tuple:
    """The problem, its clients, and the start."""
    import jax

    import fedbilevel as fb
    from fedbilevel.tasks import networks

    rng = np.random.default_rng(0)
    model = networks.mlp((PIXELS,), (HIDDEN,), CLASSES)

    def half() -> dict[str, np.ndarray]:
        images = rng.normal(size=(CLIENTS, SAMPLES, PIXELS)).astype(np.float32)
        return {"image": images, "label": rng.integers(0, CLASSES, size=(CLIENTS, SAMPLES)).astype(np.int32)}

    def outer(x, y, batch):
        return networks.cross_entropy(model.logits(x, y, batch["image"]), batch["label"])

    def inner(x, y, batch):
        return outer(x, y, batch) + RIDGE * sum((leaf**2).sum() for leaf in jax.tree.leaves(y))

    clients = fb.Clients(inner=half(), outer=half())
    x0, y0 = model.init(jax.random.key(0))
    algorithm = fb.SimFBO(local_steps=TAU, batch_size=BATCH, client_lr=fb.XYV(*LOCAL), server_lr=fb.XYV(*SERVER))
    return algorithm, fb.Bilevel(outer, inner), clients, x0, y0


def write_problem(path: Path, rounds: int) -> None:
    """The same start, data and draws as the engine's, for the peer."""
    import jax

    from fedbilevel.engines.engine import draw_cohort, round_keys
    from fedbilevel.machinery.threefry import uniform_below

    _, _, clients, x0, y0 = build()
    cohorts, draws = [], {"outer": [], "inner": []}
    for r in range(rounds):
        keys = round_keys(jax.random.key(0), r)
        cohorts.append(draw_cohort(keys.cohort, CLIENTS, COHORT))

        def steps(i, key=keys.algorithm):
            mine = jax.random.fold_in(key, i)
            pairs = jax.vmap(lambda k: jax.random.split(jax.random.fold_in(mine, k)))(np.arange(TAU))
            return jax.vmap(jax.vmap(lambda k: uniform_below(k, SAMPLES, (BATCH,))))(pairs)

        batches = np.asarray(jax.vmap(steps)(cohorts[-1]))  # (P, τ, 2, B)
        draws["outer"].append(batches[:, :, 0])
        draws["inner"].append(batches[:, :, 1])
    sets = {"inner": clients.inner.values, "outer": clients.outer.values}
    np.savez(
        path,
        x_w=x0[0]["weight"], x_b=x0[0]["bias"], y_w=y0["weight"], y_b=y0["bias"],
        v_w=np.zeros_like(y0["weight"]), v_b=np.zeros_like(y0["bias"]),
        cohorts=np.stack(cohorts), inner_batches=np.stack(draws["inner"]), outer_batches=np.stack(draws["outer"]),
        local_steps=np.array(LOCAL), server_steps=np.array(SERVER), ridge=np.array(RIDGE),
        **{f"{s}_images": v["image"].reshape(CLIENTS, SAMPLES, PIXELS) for s, v in sets.items()},
        **{f"{s}_labels": v["label"].reshape(CLIENTS, SAMPLES) for s, v in sets.items()},
    )  # fmt: skip


def run_engine(name: str, result: Path) -> None:
    """One contender of ours, in this process: seconds per round, and where it ends after a few rounds."""
    import fedbilevel as fb

    devices, tuned = ENGINES[name]
    if tuned:
        fb.tune_cpu(devices)
    arguments = build()
    began = time.perf_counter()
    few = fb.solve(*arguments, rounds=CHECKED_ROUNDS, cohort=COHORT, engine=fb.Local(devices=devices))
    first = time.perf_counter() - began
    many = fb.solve(
        *arguments, rounds=3 * TIMED_ROUNDS, cohort=COHORT, engine=fb.Local(devices=devices), eval_every=TIMED_ROUNDS
    )
    each = np.diff(many.history["seconds"])[1:] / TIMED_ROUNDS  # the first stretch warms up
    np.savez(
        result, x_w=few.x[0]["weight"], y_w=few.y["weight"], v_w=few.state.iterate.v["weight"],
        seconds_per_round=each, first=first,
    )  # fmt: skip


def once(command: list[str], result: Path) -> dict[str, np.ndarray]:
    subprocess.run(command, check=True)
    with np.load(result) as stored:
        return dict(stored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="a Python that has torch; without it the peer is left out")
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--engine", choices=sorted(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(options.engine, options.result)
        return
    if options.write:
        write_problem(Path(options.write), CHECKED_ROUNDS)
        return

    from machine import describe, gemm_rate

    here = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        problem, result = Path(folder, "problem.npz"), Path(folder, "result.npz")
        contenders = {name: [*here, "--engine", name, "--result", str(result)] for name in ENGINES}
        if options.torch:
            subprocess.run([*here, "--write", str(problem)], check=True)
            peer = str(Path(__file__).with_name("peer_torch.py"))
            contenders["PyTorch, torch.func, serial"] = [options.torch, peer, str(problem), str(result)]
        found: dict[str, list] = {name: [] for name in contenders}
        ends, rates = {}, []
        for _ in range(options.passes):
            rates.append(gemm_rate())
            for name, command in contenders.items():
                out = once(command, result)
                found[name].extend(out["seconds_per_round"].tolist())
                ends[name] = out
        rates.append(gemm_rate())
        first = first_rounds(here, result, Path(folder, "cache"))
    report(found, ends, rates, describe())
    print(f"first {CHECKED_ROUNDS} rounds compiled, tune_cpu(1): {first[0]:.1f} s; warm cache: {first[1]:.1f} s")


def first_rounds(here: list[str], result: Path, cache: Path) -> tuple[float, float]:
    """Seconds to the end of the first rounds in a new process, with an empty and with a filled compilation cache."""
    settings = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [*here, "--engine", "fedbilevel, tune_cpu(1)", "--result", str(result)]
    times = []
    for _ in range(2):
        subprocess.run(command, check=True, env={**os.environ, **settings})
        with np.load(result) as stored:
            times.append(float(stored["first"]))
    return times[0], times[1]


def report(found: dict[str, list], ends: dict, rates: list[float], machine: str) -> None:
    peak = max(rates)
    print(machine)
    print(f"NumPy float32 1024³: best {peak:.0f} GFLOP/s, passes {', '.join(f'{r:.0f}' for r in rates)}")
    torch = next((v for k, v in found.items() if k.startswith("PyTorch")), None)
    print(f"{'':38s}  ms/round: best  median   GFLOP/s   of peak   × PyTorch (best, median)")
    for name, seconds in found.items():
        best, median = min(seconds), float(np.median(seconds))
        ratio = f"{min(torch) / best:8.2f} {np.median(torch) / median:8.2f}" if torch else ""
        rate = FLOP / best / 1e9
        print(f"{name:38s} {1e3 * best:15.1f} {1e3 * median:7.1f} {rate:9.0f} {rate / peak:9.2f}  {ratio}")
    ours = ends[next(iter(ENGINES))]
    for name, end in ends.items():
        gap = max(float(np.max(np.abs(end[k] - ours[k]))) for k in ("x_w", "y_w", "v_w"))
        print(f"{name}: after {CHECKED_ROUNDS} rounds within {gap:.1e} of the first row (float32)")
    print(json.dumps({"peak_gflops": peak, "ms": {k: 1e3 * min(v) for k, v in found.items()}}))


if __name__ == "__main__":
    main()
