"""FedAvg by other libraries, by hand and by this library: a round, the cold start, memory, lines of code.

The model is the 2NN of `contest`, with a cohort of 10. The programs are peers/with_*.py. Each library has an
environment of its own, `.venv-peers/NAME`, which is made the first time (3 GB in total, more with PyTorch for GPUs). 30
steps are one pass through a client's samples. The other libraries draw samples without replacement, which changes the
loss. The cold start is the time from the beginning of the process to the end of the first round, with imports and
compilation, and without a cache. Memory is the peak of the process.
"""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure

from benchmarks.harness import ROOT, head, medians, row, spread, turns

PEERS = Path(__file__).parent / "peers"
TORCH = ["torch==2.13.0", "numpy==2.4.6"]
PINS = {
    "torch": TORCH,
    "pfl": ["pfl==0.6.0", *TORCH],
    "fedjax": ["fedjax==0.0.17", "dm-haiku==0.0.11", "jax==0.4.25", "jaxlib==0.4.25", "numpy==1.26.4", "scipy==1.12.0"],
}
"""The packages that pip installs, by library. FedJAX needs a JAX that still has `jax.tree_map`."""

SHOWN = ("torch", "pfl", "fedjax", "jax")
HERE = {
    "fedbilevel": ["with_fedbilevel.py"],
    "vmap": ["with_jax.py", "vmap"],
    "shard_map": ["with_jax.py", "shard_map"],
}
NAMES = {
    "fedbilevel": "fedbilevel",
    "vmap": "JAX by hand, vmap",
    "shard_map": "JAX by hand, shard_map",
    "torch": "PyTorch, serial",
    "pfl": "pfl",
    "fedjax": "FedJAX",
}
LIMIT = 600  # the time limit for one program, in seconds
QUICK = {"names": ["fedbilevel", "vmap"], "passes": 1, "stretch": 2}


def python_with(name: str) -> str:
    """Return the Python of a library's environment. The environment is made unless one with these versions exists."""
    room, pins = ROOT / ".venv-peers" / name, "\n".join(PINS[name])
    done, python = room / "pins.txt", str(room / "bin" / "python")
    if not done.exists() or done.read_text() != pins:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(room)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PINS[name]], check=True)
        done.write_text(pins)
    return python


def measure(name: str, stretch: int) -> dict[str, float]:
    """Run one program in its environment, and return its measurements."""
    program, *arguments = HERE.get(name) or [f"with_{name}.py"]
    python = sys.executable if name in HERE else python_with(name)
    settings = {"STRETCH": str(stretch), "STARTED": str(time.time())}
    done = subprocess.run(
        [python, str(PEERS / program), *arguments],
        check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT, env={**os.environ, **settings},
    )  # fmt: skip
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"ms"')))


def products() -> dict[str, float]:
    """Return the milliseconds of the matrix products of a round alone."""
    command = [sys.executable, str(PEERS / "products.py")]
    return {"ms": float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)}


def versions(name: str) -> str:
    """Return a text with the versions of the packages that compute the round."""
    if name in HERE:
        return f"jax {version('jax')}"
    return ", ".join(pin.replace("==", " ") for pin in PINS[name] if pin.partition("==")[0] in SHOWN)


def lines_of(name: str) -> int:
    """Count lines of code without blank lines, comments and docstrings. The hand-written program includes fedavg.py."""
    files = [(HERE.get(name) or [f"with_{name}.py"])[0]]
    if files == ["with_jax.py"]:
        files += ["fedavg.py"]
    code = [re.sub(r'""".*?"""', "", (PEERS / file).read_text(), flags=re.DOTALL) for file in files]
    return sum(bool(line.partition("#")[0].strip()) for text in code for line in text.splitlines())


def draw(measured: dict[str, list[dict[str, float]]], file: str) -> None:
    """Draw the times of a round and of the cold start: bars for medians, dots for passes, a line for their range."""
    shown = {name: measured[name] for name in reversed(NAMES) if name in measured}
    figure = Figure(figsize=(8, 0.45 * len(shown) + 1.1), dpi=120, layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"ms": "a round, ms", "first": "from start to the end of the first round, s"}
    for one, (key, title) in zip(axes, titles.items(), strict=True):
        most = max(each[key] for passes in shown.values() for each in passes)
        for height, (name, passes) in enumerate(shown.items()):
            values = [each[key] for each in passes]
            color = "tab:blue" if name == "fedbilevel" else "0.6"
            one.barh(height, median(values), color=color, alpha=0.5, height=0.65)
            one.plot([min(values), max(values)], [height, height], color="black", linewidth=1)
            one.plot(values, [height] * len(values), "o", color="black", markersize=3)
            one.text(max(values) + 0.02 * most, height, f"{median(values):.{0 if key == 'ms' else 1}f}", va="center")
        one.set_xlim(0, 1.18 * most)
        one.set_xlabel(title)
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(shown)), [NAMES[name] for name in shown])
    figure.savefig(file)


def main(names: tuple[str, ...] = tuple(NAMES), passes: int = 3, stretch: int = 5, picture: str = "") -> None:
    for name in names:
        if name in PINS:
            python_with(name)
    contenders = {"products": products, **{name: partial(measure, name, stretch) for name in names}}
    measured = turns(contenders, passes)
    alone = medians(measured.pop("products"))["ms"]
    ours = medians(measured[names[0]])["ms"]
    head("library", "with", "ms a round", f"of {names[0]}", "cold start, s", "memory, MB", "loss", "lines")
    for name, runs in measured.items():
        middle, ms, first = medians(runs), *(spread((one[key] for one in runs), ".1f") for key in ("ms", "first"))
        of_ours, mb, loss = f"**{middle['ms'] / ours:.2f}**", f"{middle['mb']:.0f}", f"{middle['loss']:.3f}"
        row(NAMES[name], versions(name), ms, of_ours, first, mb, loss, lines_of(name))
    print(f"\nThe matrix products of a round alone, by NumPy on every core: {alone:.1f} ms, {alone / ours:.0%} of it.")
    if picture:
        draw(measured, picture)
