"""Write docs/papers, a page for each paper, and the table of the README: what came of every entry that was played.

    python scripts/papers.py [FOLDER]

FOLDER is that of `fedbilevel reproduce --out`, whose newest outcomes and pictures are kept first; without it the pages
are written anew from what is kept. A test compares the pages with what this writes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedbilevel.experiments import toml
from fedbilevel.reproduce.entry import Entry, load_all
from fedbilevel.reproduce.outcome import FILE, STALE, difference_in_words, mean_in_words, read, state_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "papers"
PAPERS = {
    "afbo": "Anarchic federated bilevel optimization (AFBO)",
    "fednest": "FedNest (Tarzanagh et al., ICML 2022)",
    "fism": "Federated incremental subgradient method (FISM, Boontawee et al.)",
    "rabo": "RABO and RAFBO (Li et al.)",
    "simfbo": "SimFBO and ShroFBO (Yang et al., NeurIPS 2023)",
    "theory": "What theorems claim",
}
NOT_RUN = "not run"
MARK = {"reproduced": "✔", "partly reproduced": "◐", "not reproduced": "✘", "undecided": "?", NOT_RUN: "–", STALE: "!"}
Outcomes = dict[str, dict[str, Any]]


def keep(folder: Path) -> None:
    """Take over outcomes and pictures."""
    PAGES.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.glob(f"*/quick/{FILE}")):
        name = file.parent.parent.name
        (PAGES / f"{name}.json").write_text(json.dumps(read(file), indent=1, ensure_ascii=False) + "\n", "utf-8")
        (PAGES / f"{name}.png").write_bytes((file.parent / "figure.png").read_bytes())


def written() -> Iterator[tuple[Path, str]]:
    """(file, its text) of everything that is generated."""
    entries = load_all()
    found = {entry.id: read(file) for entry in entries if (file := PAGES / f"{entry.id}.json").is_file()}
    yield PAGES / "README.md", index(entries, found)
    for paper, name in PAPERS.items():
        own = [entry for entry in entries if entry.paper == paper]
        yield PAGES / f"{paper}.md", "\n".join(page(name, own, found))


def state(entry: Entry, found: Outcomes) -> str:
    return state_of(entry, found[entry.id]) if entry.id in found else NOT_RUN


def index(entries: list[Entry], found: Outcomes) -> str:
    """The table of all entries."""
    lines = [
        "# What the papers show, and what came out here\n",
        "Each row is a figure or table, run by one command, with the claims written before "
        "([how](../how-to/reproduce.md)).",
        "The scale is the quick one, of minutes on two cores: what differs from the paper is on the pages.\n",
        "| entry | part | shows | state |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| [`{entry.id}`]({entry.paper}.md#{entry.id}) | {entry.part} | {entry.title} "
        f"| {MARK[state(entry, found)]} {state(entry, found)} |"
        for entry in entries
    ]
    return "\n".join(lines) + "\n"


def page(name: str, entries: list[Entry], found: Outcomes) -> Iterator[str]:
    """The page of a paper."""
    yield f"# {name}\n"
    yield "Written by `scripts/papers.py` from the outcomes beside it; [all papers](README.md).\n"
    for entry in entries:
        yield f"## {entry.id}\n"
        yield f"**{entry.part}: {entry.title}.** {entry.shows}\n"
        if entry.id not in found:
            yield f"State: {NOT_RUN}. `fedbilevel reproduce {entry.id}` runs it.\n"
            continue
        yield from section(entry, found[entry.id])


def section(entry: Entry, one: dict[str, Any]) -> Iterator[str]:
    """What came of an entry."""
    came = state_of(entry, one)
    yield f"{MARK[came]} **{came}** (`fedbilevel reproduce {entry.id}`, {one['date']})\n"
    yield f"![{entry.title}]({entry.id}.png)\n"
    yield "| claim | panel | beside | better by | state |\n|---|---|---|---:|---|"
    for claim in one["findings"]:
        note = f" ({claim['note']})" if claim["note"] else ""
        cells = [claim["says"], claim["panel"], claim["than"], difference_in_words(claim), claim["state"] + note]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield f"`{entry.metric}` at the end, mean ± standard deviation over the seeds:\n"
    yield "| method | " + " | ".join(one["panels"]) + " |\n|---|" + "---:|" * len(one["panels"])
    for method in entry.methods:
        yield f"| {method} | " + " | ".join(_cell(entry, of.get(method)) for of in one["panels"].values()) + " |"
    yield ""
    if entry.reported:
        yield "What the paper reports:\n\n| | | from |\n|---|---|---|"
        yield from (f"| {said.what} | {said.value} | {said.source} |" for said in entry.reported)
        yield ""
    yield f"Its setting: {' '.join(entry.setting.split())}\n"
    yield "Here:\n"
    yield from (f"- {difference}" for difference in entry.differences)
    yield from _provenance(entry, one)


def _cell(entry: Entry, of: dict[str, Any] | None) -> str:
    return "" if of is None else mean_in_words(entry.metric, of)


def _provenance(entry: Entry, one: dict[str, Any]) -> Iterator[str]:
    if one["trials"]:
        yield f"- Steps: {one['trials']} trials for each method and panel, by {one['selected_on']} on held-out data:"
        for panel, methods in one["panels"].items():
            chosen = "; ".join(f"{name} {_chosen(of['chosen'])}" for name, of in methods.items())
            yield f"  - {panel}: {chosen}"
    else:
        yield f"- Nothing is chosen: {entry.untuned}"
    made, seeds = one["environment"], ", ".join(map(str, one["seeds"]))
    software = f"jax {made['jax']}, NumPy {made['numpy']}, Python {made['python']}"
    spent = f"{one['minutes']:.1f} minutes, {one['processor_seconds']:.0f} processor seconds"
    yield f"- Seeds {seeds}; {spent}, which other"
    yield f"  programs shared; {software}, {made['cpus']} cores."
    yield ""


def _chosen(values: dict[str, Any] | None) -> str:
    if values is None:
        return "none: every trial failed"
    return ", ".join(f"{name} = {toml.value(value)}" for name, value in values.items())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    for file, content in written():
        file.write_text(content, "utf-8")
