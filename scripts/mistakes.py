"""Check that tests find mistakes: put each mistake of mistakes.toml into a copy of the project, and test the copy.

This script takes more than an hour, and is run by hand: `.venv/bin/python scripts/mistakes.py`. It prints a line for
each mistake, and a table of how many mistakes were found in each room. The project itself is not changed.

An entry of mistakes.toml has a room; a description of the mistake; `right`, a text that occurs exactly once in src;
`wrong`, which replaces this text; and the `tests` that should find the mistake, or `only` some of them (as pytest's
-k). If `right` does not occur, or occurs in several places, this is reported: a person who changes the code must update
the entry.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NoReturn

os.environ |= {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}  # see conftest.py
import jax  # noqa: F401
import optax  # noqa: F401
import pytest

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "scripts" / "mistakes.toml"
SECONDS = 400  # the time limit for the tests of one mistake
FOUND, ESCAPED, UNCLEAR = "found", "escaped", "unclear"


def copied(to: Path) -> Path:
    """Copy the files that git tracks, as they are now, and return the copy.

    Programs that tests compile are cached in the project.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


@cache
def texts_in(src: Path) -> list[tuple[Path, str]]:
    """Return (file, its text without a mistake) for each Python file."""
    return [(path, path.read_text("utf-8")) for path in sorted(src.rglob("*.py"))]


def place_of(right: str, src: Path) -> Path | str:
    """Return the file in which a text occurs exactly once, or a text that says why there is none."""
    found = [path for path, text in texts_in(src) for _ in range(text.count(right))]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted({path.relative_to(src).as_posix() for path in found}))
    return f"its text stands in {len(found)} places: {names}" if found else "its text is nowhere in src"


def run(mistake: dict[str, str], copy: Path) -> tuple[str, str]:
    """Run the tests of a mistake in the copy.

    Return FOUND if a test fails, or ESCAPED if all pass; and the first test that fails.
    """
    arguments = ["-q", "-n", "0", "-x", "--no-header", "--tb=no", "-rfE", "-o", f"cache_dir={ROOT / '.pytest_cache'}"]
    arguments += [*mistake["tests"].split(), *(["-k", mistake["only"]] if "only" in mistake else [])]
    shown = copy / "shown.txt"
    child = multiprocessing.get_context("fork").Process(target=test_there, args=(copy, arguments, shown))
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        child.kill()
        return UNCLEAR, f"the tests took more than {SECONDS} s"
    lines = shown.read_text("utf-8").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if child.exitcode in (0, 1, 2):
        return (FOUND if child.exitcode else ESCAPED), (failed or [""])[0].partition(" - ")[0]
    return UNCLEAR, "; ".join(lines[-3:])


def test_there(copy: Path, arguments: list[str], shown: Path) -> NoReturn:
    """Run pytest in the copy, in a forked process.

    Slow packages have been imported before the fork, but not the project.
    """
    with open(shown, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy / "src"))
    os.environ["PYTHONPATH"] = str(copy / "src")  # used by processes that tests start
    code = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(code)


def play(mistake: dict[str, str], copy: Path) -> tuple[str, str]:
    """Put a mistake into the copy, run its tests, and restore the copy."""
    place = place_of(mistake["right"], copy / "src")
    if isinstance(place, str):
        return UNCLEAR, place
    text = place.read_text("utf-8")
    place.write_text(text.replace(mistake["right"], mistake["wrong"]), "utf-8")
    try:
        return run(mistake, copy)
    finally:
        place.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mistakes whose room or description has one of these words")
    parser.add_argument(
        "--unchecked", action="store_true", help="do not first see that the tests pass without mistakes"
    )
    given = parser.parse_args()
    mistakes = tomllib.loads(LISTED.read_text("utf-8"))["mistake"]
    if given.words:
        mistakes = [one for one in mistakes if any(word in f"{one['room']} {one['what']}" for word in given.words)]
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        if not given.unchecked:
            every = {test for mistake in mistakes for test in mistake["tests"].split()}
            verdict, which = run({"tests": " ".join(sorted(every))}, copy)
            if verdict != ESCAPED:
                sys.exit(f"without any mistake: {verdict} {which}")
        for mistake in mistakes:
            began = time.monotonic()
            verdict, which = play(mistake, copy)
            counts[mistake["room"], verdict] += 1
            seconds = time.monotonic() - began
            print(f"{verdict:8} {seconds:4.0f} s  {mistake['room']}: {mistake['what']}  {which}", flush=True)
    print(f"\n{'room':12} {FOUND:>8} {ESCAPED:>8} {UNCLEAR:>8}")
    for room in [*dict.fromkeys(mistake["room"] for mistake in mistakes), "all"]:
        row = [
            sum(n for (of, said), n in counts.items() if room in (of, "all") and said == v)
            for v in (FOUND, ESCAPED, UNCLEAR)
        ]
        print(f"{room:12} {row[0]:8} {row[1]:8} {row[2]:8}")


if __name__ == "__main__":
    main()
