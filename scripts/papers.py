"""Write what came of every entry that was played: docs/papers, the table in README.md, and kept.json for --list.

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
from fedbilevel.reproduce import picture
from fedbilevel.reproduce.entry import Entry, Scale, load_all
from fedbilevel.reproduce.outcome import (
    FILE,
    STALE,
    SUMMARY,
    difference_in_words,
    holding_in_words,
    methods_in_words,
    of_each_run,
    read,
    readings_in_words,
    state_of,
)
from fedbilevel.reproduce.protocol import SEEDS
from fedbilevel.reproduce.ranking import budget_in_words, overview, place_in_words, told_apart

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "papers"
README = ROOT / "README.md"
KEPT = ROOT / "src" / "fedbilevel" / "reproduce" / "kept.json"
PAPERS = {
    "afbo": "Anarchic federated bilevel optimization (AFBO)",
    "fednest": "FedNest (Tarzanagh et al., ICML 2022)",
    "fism": "Federated incremental subgradient method (FISM, Boontawee et al.)",
    "leaderboard": "Leaderboard: methods under equal budgets",
    "rabo": "RABO and RAFBO (Li et al.)",
    "simfbo": "SimFBO and ShroFBO (Yang et al., NeurIPS 2023)",
    "theory": "What theorems claim",
}
NOT_RUN = "not run"
MARK = {
    "reproduced": "✔",
    "partly reproduced": "◐",
    "not reproduced": "✘",
    "undecided": "?",
    "ranked": "✔",
    NOT_RUN: "–",
    STALE: "!",
}
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
    yield README, numbers(entries, found)
    yield KEPT, summaries(found)
    for paper, name in PAPERS.items():
        own = [entry for entry in entries if entry.paper == paper]
        yield PAGES / f"{paper}.md", "\n".join(page(name, own, found))


def numbers(entries: list[Entry], found: Outcomes) -> str:
    """README.md with the table of the papers' figures and tables."""
    head, begin, rest = README.read_text("utf-8").partition("<!-- papers -->\n")
    _, end, tail = rest.partition("<!-- -->\n")
    rows = [
        f"| [`{entry.id}`](docs/papers/{entry.paper}.md#{entry.id}) | {entry.title} | {came(entry, found)} |\n"
        for entry in entries
        if entry.paper not in ("theory", "leaderboard")
    ]
    return "".join([head, begin, "| entry | shows | state, claims that hold |\n|---|---|---|\n", *rows, end, tail])


def state(entry: Entry, found: Outcomes) -> str:
    return state_of(entry, found[entry.id]) if entry.id in found else NOT_RUN


def came(entry: Entry, found: Outcomes) -> str:
    """The state of an entry with its mark, and how many of its claims hold."""
    said = state(entry, found)
    holding = holding_in_words(found[entry.id]) if said not in (NOT_RUN, STALE) else ""
    return f"{MARK[said]} {said}" + f", {holding}" * bool(holding)


def summaries(found: Outcomes) -> str:
    """The content of kept.json, a line for each entry."""
    lines = [
        f"{json.dumps(id)}: {json.dumps({name: one[name] for name in SUMMARY}, ensure_ascii=False)}"
        for id, one in found.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def index(entries: list[Entry], found: Outcomes) -> str:
    """The table of all entries."""
    lines = [
        "# What the papers show, and what came out here\n",
        "Each row is a figure or table, run by one command, with the claims written before "
        "([how](../how-to/reproduce.md)).",
        "The scale is the quick one, of minutes on two cores: what differs from the paper is on the pages.",
        "A claim is counted for each panel and each other method that it is about. *: revised after a first run.\n",
        "| entry | part | shows | state, claims that hold |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| [`{entry.id}`]({entry.paper}.md#{entry.id}) | {entry.part} | {entry.title} "
        f"| {came(entry, found)}{' *' * bool(entry.revised)} |"
        for entry in entries
    ]
    return "\n".join(lines) + "\n"


def page(name: str, entries: list[Entry], found: Outcomes) -> Iterator[str]:
    """The page of a paper."""
    yield f"# {name}\n"
    yield "Written by `scripts/papers.py` from the outcomes beside it; [all papers](README.md).\n"
    if not any(entry.ranked for entry in entries):
        yield DIFFERENCE
    for entry in entries:
        yield f"## {entry.id}\n"
        yield f"**{entry.part}: {entry.title}.** {entry.shows}\n"
        if entry.id not in found:
            yield f"State: {NOT_RUN}. `fedbilevel reproduce {entry.id}` runs it.\n"
            continue
        yield from section(entry, found[entry.id])


def section(entry: Entry, one: dict[str, Any]) -> Iterator[str]:
    """What came of an entry."""
    said = state_of(entry, one)
    seeds = "" if one["seeds"] == list(SEEDS) else f" --seeds {','.join(map(str, one['seeds']))}"
    yield f"{MARK[said]} **{said}** (`fedbilevel reproduce {entry.id}{seeds}`, {one['date']})\n"
    if entry.revised:
        yield f"Revised: {entry.revised}\n"
    yield f"![{entry.title}]({entry.id}.png)\n"
    yield from board(entry, one) if entry.ranked else claims(entry, one)
    if entry.reported:
        yield "What the paper reports:\n\n| | | from |\n|---|---|---|"
        yield from (f"| {said.what} | {said.value} | {said.source} |" for said in entry.reported)
        yield ""
    if not entry.ranked:
        yield f"Its setting: {' '.join(entry.setting.split())}\n"
    yield "Here:\n"
    yield from (f"- {difference}" for difference in entry.differences)
    yield from _provenance(entry, one)


def claims(entry: Entry, one: dict[str, Any]) -> Iterator[str]:
    """What came of each claim, and what the runs ended with."""
    yield "| claim | panel | methods | values of both | difference | state |\n|---|---|---|---:|---:|---|"
    for claim in one["findings"]:
        if claim["panel"] and claim["panel"] not in one["panels"]:
            continue
        note = f" ({claim['note']})" if claim["note"] else ""
        said = [methods_in_words(claim), readings_in_words(entry, claim), difference_in_words(claim)]
        yield f"| {' | '.join([claim['says'], claim['panel'], *said, claim['state'] + note])} |"
    yield ""
    if left := [panel for panel in entry.panels if panel not in one["panels"]]:
        yield f"Not played at this scale, so that claims about them are open: {'; '.join(left)}.\n"
    yield from numbers_of(entry, one)


def numbers_of(entry: Entry, one: dict[str, Any]) -> Iterator[str]:
    """The metric of each method in each panel: at the end, or as a claim of a slope reads it off the mean curve."""
    columns, besides = picture.numbers_of(entry, one)
    yield f"`{entry.metric}` at the end, mean ± standard deviation over the seeds{besides}:\n"
    yield "| method | " + " | ".join(one["panels"]) + " |\n|---|" + "---:|" * len(one["panels"])
    yield from (f"| {' | '.join(row)} |" for row in zip(*columns.values(), strict=True))
    yield ""


def board(entry: Entry, one: dict[str, Any]) -> Iterator[str]:
    """A leaderboard: ranks over all, what cannot be told apart, and the numbers of each panel."""
    found, budgets = one["ranks"], {panel: entry.panels[panel].budgets for panel in one["ranks"]}
    yield RULE
    yield from _table(overview(found))
    yield "Budgets, in the order of the ranks in a cell:\n"
    for panel, of in budgets.items():
        yield f"- {panel}: {', '.join(budget_in_words(cost, amount) for cost, amount in of.items())}"
    yield "\n### Which are level with the best\n"
    yield "Those in a row share rank 1: none of all methods is better than they are for sure.\n"
    rows = told_apart(found)
    yield from _table(
        {
            "task": [panel for panel, *_ in rows],
            "after": [budget_in_words(cost, budgets[panel][cost]) for panel, cost, *_ in rows],
            "level with the best": [", ".join(first) for *_, first, _ in rows],
            "of": [str(count) for *_, count in rows],
        }
    )
    for panel, of in found.items():
        metric = entry.measured_in(panel)
        yield f"### {panel[0].upper()}{panel[1:]}\n"
        yield f"Rank, and mean ± standard deviation of `{metric}` over the seeds:\n"
        columns = {
            budget_in_words(cost, budgets[panel][cost]): [place_in_words(metric, place) for place in at.values()]
            for cost, at in of.items()
        }
        yield from _table({"method": list(next(iter(of.values()))), **columns})
    if one["errors"]:
        yield "### What failed\n"
        yield from (f"- {what}: {' '.join(why.split())}" for what, why in one["errors"].items())
        yield ""
    yield AGAIN
    yield "### What was run\n"


DIFFERENCE = """\
A difference is by how much the first method is better, paired by seed, ± half of its 95 % confidence interval; of a
slope it is the fitted one less the predicted one, ± twice its standard error; of a claim about a share of what the
other method has, it is the margin below that share. Values are means over the seeds
([the rules](../how-to/reproduce.md)).
"""
RULE = """\
In each cell of the table stand a method's ranks in a task at four budgets; a method's rank is one more than the number
of methods that are better for sure: the 95 % confidence interval of the difference (Student's, paired by seed; of an
error in powers of ten) lies above 0. So all that cannot be told apart from the best is first, too, and with three seeds
that is often much. A method whose numbers scatter from seed to seed is hard to tell from any other: it may share rank 1
with a mean far below that of one with rank 2. So the table is in the order of the mean place by the mean alone, that of
a method which fails being the last, and those that play fewer tasks below the others; "level with the best" counts the
ranks 1. Nothing is corrected for the number of comparisons.
"""
AGAIN = """\
### Run it again, add a method

`fedbilevel reproduce leaderboard` plays it, and goes on where it was interrupted; `--full` adds the tasks that are left
out here; `--seeds 0,1,2,3,4` tells more apart. Its file is `src/fedbilevel/reproduce/entries/leaderboard.toml`: a
method is a table `[methods.NAME]` there, with its `algorithm` and, as `ladder`, the step that is tuned, and its name in
the `methods` of the panels that it can play. With the same `--out` only what is new is played.
"""


def _table(columns: dict[str, list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    yield from (f"| {' | '.join(row)} |" for row in zip(*columns.values(), strict=True))
    yield ""


def _provenance(entry: Entry, one: dict[str, Any]) -> Iterator[str]:
    if one["trials"]:
        yield f"- Steps: {one['trials']} trials for each method and panel, by {one['selected_on']} on held-out data:"
        for panel, methods in one["panels"].items():
            chosen = "; ".join(
                f"{name} {_chosen(entry, panel, name, one['scale'], of)}" for name, of in methods.items()
            )
            yield f"  - {panel}: {chosen}"
        if ends := _ends(entry, one):
            note = "the first or the last of those that were tried, as any of two is: better ones may lie beyond"
            yield f"  - {ends} {note}"
    else:
        yield f"- Nothing is chosen: {entry.untuned}"
    made, seeds = one["environment"], ", ".join(map(str, one["seeds"]))
    software = f"jax {made['jax']}, NumPy {made['numpy']}, Python {made['python']}"
    if commit := made.get("commit"):
        software = f"fedbilevel {commit}, {software}"
    spent = f"{one['minutes']:.1f} minutes, {one['processor_seconds']:.0f} processor seconds"
    yield f"- Seeds {seeds}; {spent}; {software}, {made['cpus']} cores."
    yield ""


def _ends(entry: Entry, one: dict[str, Any]) -> str:
    """How many of the chosen values are at an end of those that were tried: "3 of 8 chosen values are"."""
    chosen = [
        (value, tried)
        for panel, methods in one["panels"].items()
        for method, of in methods.items()
        for name, values in (of["chosen"] or {}).items()
        if len(tried := entry.grid(panel, method, one["scale"])[name]) > 1
        for value in of_each_run(values)
    ]
    count = sum(value in (tried[0], tried[-1]) for value, tried in chosen)
    return f"{count} of {len(chosen)} chosen values are" if count else ""


def _chosen(entry: Entry, panel: str, method: str, scale: Scale, of: dict[str, Any]) -> str:
    """What was chosen, of which values, and how many trials failed."""
    failed = f" (failed trials: {of['failed_trials']})" if of["failed_trials"] else ""
    if of["chosen"] is None:
        return f"none{failed}"
    tried = entry.grid(panel, method, scale)
    words = {name: ", ".join(map(toml.value, tried[name])) for name in of["chosen"]}
    return (
        ", ".join(f"{name} = {toml.value(value)} of {{{words[name]}}}" for name, value in of["chosen"].items()) + failed
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    for file, content in written():
        file.write_text(content, "utf-8")
