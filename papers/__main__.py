"""`python -m papers`: run the figures and tables of papers, say which claims hold, and write the pages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fedbilevel.data import DataError
from fedbilevel.errors import FedbilevelError
from papers import page, play
from papers.figure import SCALES, Figure, Scale, find, require
from papers.picture import draw

EPILOG = """\
The rules by which values are chosen and claims are decided are in papers/README.md.

  python -m papers --list
  python -m papers simfbo-3                          a figure; also a paper, such as simfbo, or all
  python -m papers my/own.toml                       a figure of your own
  python -m papers all --out runs/papers
  python -m papers fednest-2a --full --rehearse      one round of each method in the paper's own setting

If the command is interrupted, give it again: it continues where it stopped. The same command in another terminal shares
the work. Data sets are read from $FEDBILEVEL_DATA, or downloaded.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m papers", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="an id, a paper, all, or the path of a file")
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the figures, and their outcomes in --out or, without one there, the stored ones",
    )
    parser.add_argument("--full", action="store_true", help="the paper's own setting, for a GPU (minutes on two cores)")
    parser.add_argument("--seeds", type=seeds, metavar="N,N,…", help="(as many seeds as the file of the figure says)")
    parser.add_argument(
        "--chosen",
        action="store_true",
        help="take the values chosen in the stored outcome; run only settings that have other seeds or another method",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/papers"), metavar="DIR", help="(runs/papers)")
    parser.add_argument("--rehearse", action="store_true", help="run only one round of each method")
    parser.add_argument(
        "--keep", action="store_true", help="store the outcome next to the file of the figure, and write the pages"
    )
    return reported(partial(follow, parser.parse_args(arguments)))


def seeds(text: str) -> list[int]:
    """Read seeds that are separated by commas."""
    found = [int(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text} has a seed twice")
    return found


def reported(command: Callable[[], None]) -> int:
    """Run a command, and return its exit code. An error and Ctrl-C end the command with one line of text."""
    try:
        command()
    except (FedbilevelError, DataError) as error:
        print(f"papers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("papers: interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    return 0


def follow(given: argparse.Namespace) -> None:
    """Do what the arguments of the command ask for."""
    scale: Scale = SCALES[given.full]
    require(given.figures or given.list or given.keep, "which figure? --list names them")
    figures = find(given.figures or (["all"] if given.list else []))
    if given.list:
        print(listing(figures, scale, given.out))
        return
    if figures:
        play.prepare(max(play.devices_of(figure, scale) for figure in figures))
    for figure in figures:
        if given.rehearse:
            play.rehearse(figure, scale, given.out)
        else:
            play_figure(figure, scale, given)
    if given.keep and not given.rehearse:
        for file, text in page.written():
            play.write(file, text)


def play_figure(figure: Figure, scale: Scale, given: argparse.Namespace) -> None:
    """Run a figure, write its outcome, and print what it decides."""
    before = page.kept(figure) or {} if given.chosen else None
    found = play.play(figure, scale, given.out, seeds=given.seeds, before=before)
    text, drawn = json.dumps(found, indent=1, ensure_ascii=False) + "\n", draw(figure, found)
    place = given.out / figure.id / scale
    play.write(place / "outcome.json", text)
    play.write(place / "figure.png", drawn)
    if given.keep:
        play.write(figure.file.with_suffix(".json"), text)
        play.write(figure.file.with_suffix(".png"), drawn)
    print("\n".join(page.section(figure, found)))


def listing(figures: list[Figure], scale: Scale, out: Path) -> str:
    """Return a line for each figure: its minutes, its state, and its title."""
    lines = []
    for figure in figures:
        file = out / figure.id / scale / "outcome.json"
        own = json.loads(file.read_text("utf-8")) if file.is_file() else None
        found = own or (page.kept(figure) if scale == "quick" else None)
        state = page.state_of(figure, found) + " (stored)" * (found is not None and own is None)
        minutes = figure.size(scale).minutes or 0
        takes = f"{minutes:g} min" if minutes < 120 else f"{minutes / 60:,.0f} h"
        lines.append(f"{figure.id:22}{takes:>8}  {state:26} {figure.title}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
