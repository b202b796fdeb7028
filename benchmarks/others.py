"""The contest with other libraries, each in an environment of its own: `contest.py --others`."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOM = Path(__file__).parent
ROOT = ROOM.parent
TORCH = ["torch==2.13.0", "numpy==2.4.6"]
PINS = {
    "torch": TORCH,
    "pfl": ["pfl==0.6.0", *TORCH],
    "fedlab": ["fedlab==1.3.0", "torchvision==0.28.0", "pandas==3.1.1", *TORCH],
    "fedjax": ["fedjax==0.0.17", "dm-haiku==0.0.11", "jax==0.4.25", "jaxlib==0.4.25", "numpy==1.26.4", "scipy==1.12.0"],
    "flower": [
        *("flwr[simulation]==1.42.0", "ray==2.55.1", "grpcio==1.85.3", "grpcio-health-checking==1.81.1"),
        *("protobuf==6.33.6", *TORCH),
    ],
}
"""What pip installs. FedJAX wants a JAX that still has `jax.tree_map`; without its pins Flower's pip does not end."""

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
    "fedlab": "FedLab",
    "fedjax": "FedJAX",
    "flower": "Flower, simulation",
}
LIMIT = 600  # seconds of one program
HEAD = [
    "| who | with | ms a round | from to | of fedbilevel | cold start, s | from to | memory, MB | loss | lines |",
    "|---|---|---:|---|---:|---:|---|---:|---:|---:|",
]


def play(names: list[str], passes: int, kept: Path | None, picture: Path | None) -> list[str]:
    """Install, run the programs in turn, print the table; `kept` holds the passes of earlier commands, too."""
    found: dict[str, list] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    broken = {name: why for name in names if name in PINS and passes and (why := installed(name))}
    for _ in range(passes):
        found.setdefault("products", []).append({"ms": products()})
        for name in names:
            found.setdefault(name, []).append(broken.get(name) or once(name))
            if kept:
                kept.write_text(json.dumps(found))
    lines = [*HEAD, *(row(name, found) for name in NAMES if name in found), "", rate(found)]
    print("\n".join(lines), flush=True)
    if picture:
        draw(found, picture)
    return lines


def products() -> float:
    """Milliseconds that the matrix products of a round take alone."""
    command = [sys.executable, str(ROOM / "peers" / "products.py")]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def rate(found: dict[str, list]) -> str:
    """How much of our round, and of the others', these products would take."""
    alone = statistics.median(one["ms"] for one in found["products"])
    told = f"The matrix products of a round alone, by NumPy on every core: {alone:.1f} ms"
    ours = [one["ms"] for one in found.get("fedbilevel", []) if not isinstance(one, str)]
    return f"{told}; of our round {alone / statistics.median(ours):.0%}." if ours else f"{told}."


def environment(name: str) -> Path:
    return ROOT / ".venv-peers" / name


def installed(name: str) -> str:
    """Make the environment, where there is none with these pins; return why that failed."""
    room, pins = environment(name), "\n".join(PINS[name])
    done = room / "pins.txt"
    if done.exists() and done.read_text() == pins:
        return ""
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(room)],
        [str(room / "bin" / "pip"), "install", "--quiet", *PINS[name]],
    ):
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            return last_line(ran.stderr)
    done.write_text(pins)
    return ""


def once(name: str) -> dict[str, float] | str:
    """Run one program; its numbers, or why there are none. Ray's workers get the priority that the others have."""
    program, *arguments = HERE.get(name) or [f"with_{name}.py"]
    python = sys.executable if name in HERE else str(environment(name) / "bin" / "python")
    command = [python, str(ROOM / "peers" / program), *arguments]
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "STARTED": str(time.time()), "RAY_worker_niceness": "0"},
        )
    except subprocess.TimeoutExpired:
        return f"did not end in {LIMIT} s"
    numbers = [line for line in ran.stdout.splitlines() if line.startswith('{"ms"')]
    return json.loads(numbers[-1]) if numbers else last_line(ran.stderr)


def last_line(text: str) -> str:
    """The last line of an error; JAX's remark on its traceback is none."""
    lines = [line.strip() for line in text.partition("-" * 20)[0].splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def row(name: str, found: dict[str, list]) -> str:
    """One line of the table: medians over passes, with the least and the most."""
    passes = [one for one in found[name] if not isinstance(one, str)]
    start = f"| {NAMES[name]} | {', '.join(version(name))} |"
    if not passes:
        return f"{start} {found[name][-1]} | | | | | | | |"
    ms, first, mb, loss = ([one[key] for one in passes] for key in ("ms", "first", "mb", "loss"))
    ours = [one["ms"] for one in found.get("fedbilevel", []) if not isinstance(one, str)]
    of_ours = f"**{statistics.median(ms) / statistics.median(ours):.2f}**" if ours else ""
    return (
        f"{start} {statistics.median(ms):.1f} | {min(ms):.1f} to {max(ms):.1f} | {of_ours} "
        f"| {statistics.median(first):.1f} | {min(first):.1f} to {max(first):.1f} "
        f"| {statistics.median(mb):.0f} | {statistics.median(loss):.3f} | {lines_of(name)} |"
    )


def version(name: str) -> list[str]:
    """What the round is computed with."""
    if name in HERE:
        import jax

        return [f"jax {jax.__version__}"]
    main = [pin for pin in PINS[name] if pin.partition("=")[0].partition("[")[0] in TOLD]
    return [re.sub(r"(\[.*\])?==", " ", pin) for pin in main]


TOLD = ("torch", "pfl", "fedlab", "fedjax", "jax", "flwr", "ray")


def lines_of(name: str) -> int:
    """Lines of code of the program, without blank ones, comments and docstrings; by hand, of fedavg.py as well."""
    files = [(HERE.get(name) or [f"with_{name}.py"])[0]]
    if files == ["with_jax.py"]:
        files += ["fedavg.py"]
    code = [re.sub(r'""".*?"""', "", (ROOM / "peers" / file).read_text(), flags=re.DOTALL) for file in files]
    return sum(bool(line.partition("#")[0].strip()) for text in code for line in text.splitlines())


def draw(found: dict[str, list], path: Path) -> None:
    """Two panels, ms a round and cold start: bars to the medians, dots for passes, a line over their range."""
    from matplotlib.figure import Figure

    played = {n: p for n in reversed(NAMES) if (p := [one for one in found.get(n, []) if not isinstance(one, str)])}
    figure = Figure(figsize=(8, 0.45 * len(played) + 1.1), dpi=120)
    axes = figure.subplots(1, 2, sharey=True)
    for one, key, title in zip(
        axes, ("ms", "first"), ("a round, ms", "from start to the end of the first round, s"), strict=True
    ):
        most = max(p[key] for passes in played.values() for p in passes)
        for height, (name, passes) in enumerate(played.items()):
            values = [p[key] for p in passes]
            color = "tab:blue" if name == "fedbilevel" else "0.6"
            one.barh(height, statistics.median(values), color=color, alpha=0.5, height=0.65)
            one.plot([min(values), max(values)], [height, height], color="black", linewidth=1)
            one.plot(values, [height] * len(values), "o", color="black", markersize=3)
            digits = 0 if key == "ms" else 1
            one.text(max(values) + 0.02 * most, height, f"{statistics.median(values):.{digits}f}", va="center")
        one.set_xlim(0, 1.18 * most)
        one.set_xlabel(title)
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(played)), [NAMES[name] for name in played])
    figure.tight_layout()
    figure.savefig(path)
