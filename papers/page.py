"""Write the page of a paper, the README.md of its folder: a head that is written by hand, and a generated part."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.experiments import COSTS
from papers.arms import besides
from papers.claims import FAILED, FAILED_COUNTS, SOME_RUNS, UNREACHED, Finding, Statement, column_of, statements
from papers.effort import seeds_in, what_decides
from papers.figure import PAPERS, Claim, Figure, files, load
from papers.numbers import POINTS, UNITS, axis, text
from papers.play import made_before

MARK = "<!-- what follows is generated -->\n"
STALE, NOT_RUN = "stale: run it again", "not run"
SIGNS = {"reproduced": "✔", "partly reproduced": "◐", "not reproduced": "✘", "undecided": "?", STALE: "!", NOT_RUN: "–"}
STATES = {"holds": "✔", "contradicted": "✘", "level": "=", "open": "?"}
DECISIONS = {"for": "✔ for", "against": "✘ against", "level": "= level", "mixed": "◐ mixed", "open": "? open"}
IN_ALL = {
    "for": "hold",
    "against": "are contradicted",
    "level": "show no difference",
    "mixed": "are mixed",
    "open": "are undecided",
}
IN_SHORT = "In short: "
ENDED = "Such a run counts with the cost at which it ended"
LATE = f"Some runs of {{}} never reach the value that the claim names. {ENDED}"
WORST = "A failed run counts with the worst value that any run of the two compared methods has"
LEGEND = """\
A *statement*, or claim, is one sentence that was tried. A *comparison* tries a statement in one setting, against one
other method. A few comparisons are of one method in two settings; the second setting is then named in parentheses. A
comparison holds (✔), is contradicted (✘), shows no difference (=), or is open (?), if the runs do not decide it. [The
rules](../README.md#the-rules) say how a comparison is decided, and how step sizes are chosen. A *seed* is a number that
fixes the random draws of a run.

The first table has a row for each statement. Its columns:

- *statement*: a statement of the paper. "Ours:" marks a statement that the paper does not make, such as one with a
  formula that we have corrected. It is not counted among the paper's statements.
- *entry*: the figure, table or theorem that makes the statement, with a link to its section below.
- *decision*: ✔ if all comparisons hold, ✘ if all are contradicted, = if all show no difference. The statement is open
  (?) if a comparison is open and none is contradicted. Otherwise it is mixed (◐).
- *comparisons*: how many of them hold, are contradicted, show no difference or are open.
- *effect*: by how much the first method is better than the others, from the smallest to the largest value of all
  comparisons. The first method is the one before the slash in the tables below; a negative number means that it is
  worse. If there is only one comparison, the number after ± is half the width of its 95 % confidence interval. Costs
  are given as multiples of the other method's cost, or of the cost in the other setting.
- *what would decide it*: the number of seeds that would decide the open comparisons, and about how many hours the
  further runs would take, on the machine of the present runs. The estimate assumes that the differences and their
  scatter stay the same.

Then comes a section for each entry. Its table has a row for each statement and a column for each setting. For example,
in the row "A is better: A / B; C", the cell "✔? 97 / 88; 93 %" says that A has 97 %, B 88 % and C 93 %. The comparison
of A with B holds, and that of A with C is open. The values are means over the seeds. If all runs of a method failed, a
dash takes the place of its value. A cell is empty if the statement is not about its setting. *Revised* says what was
changed after a first run. In the pictures, a band or a whisker reaches one standard deviation over the seeds to both
sides of the mean. A curve is the mean of the runs that did not fail. If some runs failed, a note above the panel says
of how many runs the curve is the mean. In the tables, a failed run counts with the worst value that any run of the
compared methods has.
"""
OF_SLOPES = """\
Many statements here are about a slope. Such a statement has one comparison: the slope of a line fitted to the results,
against the slope that the theorem predicts. The number after ± is then twice the standard error of the slope. If a
statement compares methods by a factor, such as "at most a hundredth", its effect counts from this factor: an effect of
one power of ten means at most a thousandth.
"""
COST_UNITS = {*COSTS, *UNITS.values()}
THEORY = "theory"  # the folder with the theorems of all papers
Outcome = Mapping[str, Any]


def kept(figure: Figure) -> Outcome | None:
    """Return the outcome that is stored beside a figure's file; None if there is none."""
    file = figure.file.with_suffix(".json")
    return json.loads(file.read_text("utf-8")) if file.is_file() else None


def state_of(figure: Figure, found: Outcome | None) -> str:
    """Return the verdict of an outcome, or STALE if the claims or the setting have changed since."""
    if found is None:
        return NOT_RUN
    return str(found["verdict"]) if found["played_for"] == figure.fingerprint(found["scale"]) else STALE


def decided(figure: Figure) -> list[Statement]:
    """Return what the stored outcome of a figure decides.

    Without an outcome, or with a stale one, all claims are open.
    """
    found = kept(figure)
    if found is None or state_of(figure, found) == STALE:
        return statements([Finding(says=claim.says, panel="", better=claim.better) for claim in figure.claims])
    return statements([Finding(**one) for one in found["findings"]])


def ours(figure: Figure) -> set[str]:
    """Return the statements of a figure that are not the paper's, but ours."""
    return {claim.says for claim in figure.claims if claim.ours}


def decisions(figures: Sequence[Figure]) -> tuple[Counter[str], int]:
    """Return how many of the papers' statements were decided in each way, and how many further statements are ours."""
    of_papers: Counter[str] = Counter()
    own = 0
    for figure in figures:
        mine = ours(figure)
        of_papers.update(one.decision for one in decided(figure) if one.says not in mine)
        own += len(mine)
    return of_papers, own


def holding(found: Outcome) -> tuple[int, int]:
    """Return how many comparisons of an outcome hold, and how many there are."""
    states = [one["state"] for one in found["findings"]]
    return states.count("holds"), len(states)


def written() -> Iterator[tuple[Path, str]]:
    """Yield (file, its text) for all texts that are generated from figures and their stored outcomes."""
    figures = [load(file) for file in files()]
    rows, heads = ["| paper | entries | statements | in short |\n|---|---:|---|---|"], {}
    for folder in dict.fromkeys(figure.file.parent for figure in figures):
        own, page = [figure for figure in figures if figure.file.parent == folder], folder / "README.md"
        head = (page.read_text("utf-8") if page.is_file() else f"# {folder.name}\n\n").partition(MARK)[0]
        sections = [line for figure in own for line in section(figure, kept(figure))]
        slopes = any(claim.slope is not None for figure in own for claim in figure.claims)
        legend = f"{LEGEND}\n{OF_SLOPES}" if slopes else LEGEND
        yield page, f"{head}{MARK}\n{legend}\n" + "\n".join([*statement_table(own), *sections])
        rows.append(row(folder.name, head, own))
        heads[folder.name] = head
    of_papers, of_all = PAPERS / "README.md", PAPERS.parent / "README.md"
    of_all_papers = filled(filled(of_papers.read_text("utf-8"), "papers", rows), "arms", arms(figures))
    yield of_papers, filled(of_all_papers, "hours", hours(figures))
    yield of_all, filled(of_all.read_text("utf-8"), "papers", in_all(figures, heads))


def filled(text: str, mark: str, lines: Sequence[str]) -> str:
    """Return a text with these lines after the mark."""
    before, begin, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, after = rest.partition("<!-- -->\n")
    return "".join([before, begin, "\n".join(lines), "\n", end, after])


def arms(figures: Sequence[Figure]) -> list[str]:
    """Return the table of what differs between the arms of each figure."""
    entries: dict[str, list[str]] = {}
    for one in figures:
        found = kept(one)
        of = besides(one, None if state_of(one, found) == STALE else found)
        entries.setdefault("; ".join(of) or "nothing", []).append(one.id)
    rows = [f"| {', '.join(ids)} | {of} |" for of, ids in entries.items()]
    return ["| entries | what differs besides the method |\n|---|---|", *rows]


def hours(figures: Sequence[Figure]) -> list[str]:
    """Return sentences on the time that all entries take at the quick scale, and on those with runs on a GPU."""
    own = [figure for figure in figures if figure.runs == figure.id]  # the others use runs of these
    on_gpu = [figure for figure in own if any(one.get("backend") == "gpu" for one in machines(kept(figure)))]
    whole, on_gpus = (sum(figure.quick.minutes or 0 for figure in some) / 60 for some in (own, on_gpu))
    sentences = [
        f"On two cores, all entries together take about {whole:.0f} hours at the quick scale.",
        "This is the sum of the estimates that `--list` prints; runs that several entries share are counted once.",
    ]
    if on_gpu:
        sentences += [
            f"About {on_gpus:.0f} of these hours are for {enumerated([figure.id for figure in on_gpu])}.",
            "Some of the stored runs of these entries were made on a GPU, where they took less time.",
        ]
    return textwrap.wrap(" ".join(sentences), 120, break_on_hyphens=False)


def machines(found: Outcome | None) -> list[Mapping[str, Any]]:
    """Return the descriptions of all machines on which the runs of an outcome were made."""
    return [one for panel in found["panels"] for one in made_before(found, panel)] if found else []


def enumerated(names: Sequence[str]) -> str:
    """Return names as one text, such as "A, B and C"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def row(paper: str, head: str, figures: Sequence[Figure]) -> str:
    """Return a paper's row in the table of all papers. The short summary is taken from the head of the paper's page."""
    counts, own = decisions(figures)
    said = ", ".join(f"{counts[name]} {name}" for name in DECISIONS if counts[name]) + f"; {own} ours" * bool(own)
    title, short = title_and_short(head)
    return f"| [{title}]({paper}/README.md) | {len(figures)} | {counts.total()}: {said} | {short} |"


def title_and_short(head: str) -> tuple[str, str]:
    """Return the names of a paper's methods and the short summary, from the head of the paper's page."""
    title, *paragraphs = head.split("\n\n")
    short = next((" ".join(text.split()) for text in paragraphs if text.startswith(IN_SHORT)), "")
    return title.removeprefix("# ").partition(":")[0], short.removeprefix(IN_SHORT)


def in_all(figures: Sequence[Figure], heads: Mapping[str, str]) -> list[str]:
    """Return the outcomes of all papers for the README of the repository: a sentence on all, and a line for each paper.

    Args:
        heads: the head of each paper's page, by its folder.
    """
    counts, own = decisions(figures)
    said = [f"{counts[name]} {words}" for name, words in IN_ALL.items() if counts[name]]
    linked = f"[{counts.total()} statements](papers/README.md)"
    papers = [in_a_line(paper, head, figures) for paper, head in heads.items() if paper != THEORY]
    sentence = f"At small scale we tried {linked} of the papers of the methods: {enumerated(said)}."
    sentence += (
        " A sentence that was tried with several data sets, networks or choices of step sizes counts several times."
    )
    further = f" Another {own} statements, such as corrections of printed formulas, are ours and are not counted."
    return [sentence + further * bool(own), "", *papers]


def in_a_line(paper: str, head: str, figures: Sequence[Figure]) -> str:
    """Return how many statements of a paper hold, and the short summary of its page, as an item of a list."""
    counts, _ = decisions([figure for figure in figures if figure.file.parent.name == paper])
    title, short = title_and_short(head)
    return f"- [{title}](papers/{paper}/README.md) ({counts['for']} of {counts.total()} statements hold): {short}"


def statement_table(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a row for each statement of a paper: decision, comparisons, effect, and what would decide open ones."""
    yield "| statement | entry | decision | comparisons | effect | what would decide it |\n|---|---|---|---|---|---|"
    for figure in figures:
        found = kept(figure)
        counts, mine = found is not None and state_of(figure, found) != STALE, ours(figure)
        for one in decided(figure):
            says = f"Ours: {one.says}" if one.says in mine else one.says
            cells = ", ".join(f"{count} {STATES[state]}" for state in STATES if (count := one.cells.get(state)))
            at = f"[{figure.id}](#{figure.id})"
            left = what_decides(figure, found, one) if found is not None and counts else "running it"
            yield f"| {says} | {at} | {DECISIONS[one.decision]} | {cells} | {effect(one)} | {left} |"
    yield ""


def effect(statement: Statement) -> str:
    """Say by how much the first method is better.

    For one comparison this is the difference with its interval; for several, the range of the differences.

    A cost of the first method is divided by the cost of the other method, or by its own cost in another setting.
    """
    known = [one for one in statement.findings if one.difference is not None]
    if not known:
        return "–"
    if not known[0].than:
        return f"slope {text('', known[0].better_mean)} ± {text('', known[0].half_width)}"
    if known[0].unit in COST_UNITS:
        shares = [one.better_mean / one.than_mean for one in known if one.better_mean and one.than_mean]
        other = "setting" if known[0].better == known[0].than else "method"
        return f"{between(shares)} times the other {other}'s cost"
    scale = 100 if known[0].unit == POINTS else 1
    if len(known) == 1:
        half = text("", scale * (known[0].half_width or math.inf))
        return f"{text('', scale * (known[0].difference or 0))} ± {half} {known[0].unit}"
    return f"{between([scale * (one.difference or 0) for one in known])} {known[0].unit}"


def between(values: Sequence[float]) -> str:
    """Return a text with the least and the largest of some numbers, or with one number if they are equal."""
    ends = dict.fromkeys([text("", min(values)), text("", max(values))]) if values else {"–": None}
    return " to ".join(ends)


def section(figure: Figure, found: Outcome | None) -> Iterator[str]:
    """Yield the section of a figure: its picture, its claims, and its outcome."""
    state = state_of(figure, found)
    yield f"## {figure.id}\n"
    if found is not None and state != STALE:
        yield f"![{figure.title}]({figure.id}.png)\n"
    yield f"**{figure.part}: {figure.title.rstrip('.')}.** The paper: {figure.shows}\n"
    if found is None:
        yield f"{SIGNS[state]} {state}: `python -m papers {figure.id}` runs it.\n"
        return
    count, of = holding(found)
    hold = f"; {count} of {of} comparisons {'holds' if count == 1 else 'hold'}" if of > 1 and state != STALE else ""
    yield f"Here: {SIGNS[state]} **{state}**{hold}. {figure.found}\n"
    if state == STALE:  # a stale outcome decides nothing
        return
    if lines := list(dict.fromkeys(f"{one.what} ({one.source})" for one in figure.reported if one.values)):
        yield f"Hollow markers and dashed lines in the picture are reported numbers: {'; '.join(lines)}.\n"
    yield from table(figure, found)
    yield from table_beside(figure, found)
    if notes := notes_of(found):
        yield f"{'. '.join(notes)}.\n"
    if left := [panel for panel in figure.panels if panel not in found["panels"]]:
        yield f"Not run at this scale, and therefore open: {'; '.join(left)}.\n"
    if figure.revised:
        yield f"Revised: {figure.revised}\n"
    yield from origin(figure, found)


def notes_of(found: Outcome) -> list[str]:
    """Return the notes of the findings, each once.

    One note names all methods that did not reach the value of a claim. Failed runs have a note for each panel.
    """
    noted = [one for one in found["findings"] if one["note"] and played(found, one)]
    notes = dict.fromkeys(one["note"] for one in noted)
    others = [note for note in notes if not note.endswith(UNREACHED) and FAILED not in note]
    for panel in dict.fromkeys(one["panel"] for one in noted):
        of = [one["note"] for one in noted if one["panel"] == panel and FAILED in one["note"]]
        lost = dict.fromkeys(part for note in of for part in note.removesuffix(FAILED_COUNTS).split("; "))
        others += [f"In “{panel}”: {'; '.join(lost)}"] * bool(lost)
    others += [WORST] * any(note.endswith(FAILED_COUNTS) for note in notes)
    if late := [note.removeprefix(SOME_RUNS).removesuffix(UNREACHED) for note in notes if note.endswith(UNREACHED)]:
        *first, last = [f"“{name}”" if " " in name else name for name in late]
        others.append(LATE.format(" and of ".join([", of ".join(first), last] if first else [last])))
    return others


def played(found: Outcome, one: Mapping[str, Any]) -> bool:
    """Return whether a finding is about panels that were run."""
    return not one["panel"] or one["panel"] in found["panels"]


def table(figure: Figure, found: Outcome) -> Iterator[str]:
    """Yield a table with a row for each claim, a column for each panel, and a state for each other method."""
    shown = [one for one in found["findings"] if played(found, one)]
    panels = list(dict.fromkeys(one["panel"] for one in shown))
    yield f"| claim | {' | '.join(panel or 'slope' for panel in panels)} |\n|---|{'---|' * len(panels)}"
    for claim in figure.claims:
        of = [one for one in shown if one["says"] == claim.says and one["better"] == claim.better]
        where = f" ({claim.than_in})" if claim.than_in else ""
        rivals = list(dict.fromkeys(one["than"] + where for one in of))
        against = f": {claim.better} / {'; '.join(rivals)}" if any(rivals) else ""
        against += next((f" ({one['unit']})" for one in of if one["unit"] in COST_UNITS), "")
        cells = [cell(figure, claim, [one for one in of if one["panel"] == panel]) for panel in panels]
        if of:
            yield f"| {claim.says}{against} | {' | '.join(cells)} |"
    yield ""


def table_beside(figure: Figure, found: Outcome) -> Iterator[str]:
    """Yield a table for each cost that decides nothing: the cost's mean for each method in each panel."""
    for cost in figure.beside:
        panels = found["panels"]
        yield f"| {axis(cost)} (they decide no claim) | {' | '.join(panels)} |\n|---|{'--:|' * len(panels)}"
        for method in figure.methods:
            values = [text(cost, of[method]["costs"].get(cost)) if method in of else "" for of in panels.values()]
            yield f"| {method} | {' | '.join(values)} |"
        yield ""


def cell(figure: Figure, claim: Claim, found: Sequence[Mapping[str, Any]]) -> str:
    """Return the cell of a claim in a panel: its states, and the readings of the runs of both methods."""
    if not found:
        return ""
    states, unit = "".join(STATES[one["state"]] for one in found), found[0]["unit"]
    if claim.slope is not None:
        one = found[0]
        fitted = "not fitted" if one["difference"] is None else f"{one['better_mean']:.2f} ± {one['half_width']:.2g}"
        return f"{states} {fitted}, predicted {claim.slope:g}".replace("-", "−")
    name = column_of(figure, claim)
    mine = next((one["better_mean"] for one in found if one["better_mean"] is not None), None)
    said = f"{states} {text(name, mine)} / {'; '.join(text(name, one['than_mean']) for one in found)}"
    return said + " %" * (unit == POINTS)


def origin(figure: Figure, found: Outcome) -> Iterator[str]:
    """Yield sentences on how a figure was run, with links to its setting and numbers."""
    files = f"Files: [setting, and differences from the paper]({figure.id}.toml), [numbers]({figure.id}.json)."
    if figure.counted:
        yield f"The costs of a round were counted without running it, on {found['date']}. {files}\n"
        return
    how = "No step size or other value was chosen by trials."
    if count := found["trials"]:
        how = f"For each method, up to {count} combinations of step sizes or other values were tried in each setting. "
        how += f"The combination with the best `{found['selected_on']}` was chosen."
        how += f" {chosen_at_ends(figure, found)}"
    minutes = f"{found['minutes']:.0f}"
    takes = {"0": "less than a minute", "1": "1 minute"}.get(minutes, f"{minutes} minutes")
    all_runs = "Trials and runs" if found["trials"] else "All runs"
    seeds = seeds_in_words(found)
    yield f"{how} Seeds: {seeds}. {all_runs} together took {takes}. Date: {found['date']}. {files}\n"


def seeds_in_words(found: Outcome) -> str:
    """Return the seeds of an outcome, with the panels that have others than the rest."""
    panels: dict[str, list[str]] = {}
    for panel in found["panels"]:
        panels.setdefault(span(seeds_in(found, panel)), []).append(panel)
    if len(panels) == 1:
        return next(iter(panels))
    return "; ".join(f"{seeds} in {' and '.join(f'“{panel}”' for panel in of)}" for seeds, of in panels.items())


def span(seeds: Sequence[int]) -> str:
    """Return seeds as a text: "0 to 9" for more than three that follow one another."""
    rows: list[list[int]] = []
    for seed in seeds:
        if rows and seed == rows[-1][-1] + 1:
            rows[-1].append(seed)
        else:
            rows.append([seed])
    return ", ".join(f"{row[0]} to {row[-1]}" if len(row) > 3 else ", ".join(map(str, row)) for row in rows)


def chosen_at_ends(figure: Figure, found: Outcome) -> str:
    """Return a sentence on how many chosen values are the smallest or the largest that were tried.

    Better values may lie beyond.
    """
    ends = []
    for panel, methods in found["panels"].items():
        for method, of in methods.items():
            points = figure.points(panel, method)
            for name, value in (of["chosen"] or {}).items():
                tried = sorted({point[name] for point in of.get("tried") or points})
                ends += [value in (tried[0], tried[-1])] if len(tried) > 1 else []
    count = sum(ends)
    many, are = ("All" if all(ends) else f"{count}", "were") if count > 1 else ("1" if count else "None", "was")
    beyond = ", so better values may lie beyond" if count else ""
    said = f"{many} of the {len(ends)} chosen values {are} the smallest or the largest of those tried{beyond}."
    return said if ends else ""
