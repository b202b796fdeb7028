"""Do the tests find mistakes? Put each of those in mistakes.toml into a copy of the project and run its tests there.

Run by hand, as it takes an hour: `.venv/bin/python scripts/mistakes.py`. It prints a line for each mistake and a table
of how many were found in each room. The project itself is not changed.

An entry of mistakes.toml names a room, what is wrong, the exact text that is `right` and stands once in src, what
replaces it (`wrong`), and the `tests` that should see it, or `only` some of them (as pytest's -k). A text that has
gone, or stands in several places, is reported and never skipped in silence: whoever changes that code brings the entry
up to date.
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
from pathlib import Path
from typing import NoReturn

os.environ |= {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"}  # as conftest.py
import jax  # noqa: F401
import optax  # noqa: F401
import pytest

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "scripts" / "mistakes.toml"
SECONDS = 400  # for the tests of one mistake
FOUND, ESCAPED, UNCLEAR = "found", "escaped", "unclear"


def copied(to: Path) -> Path:
    """A copy of the files that git tracks, as they are now; what tests compile is kept with the project."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def place_of(right: str, src: Path) -> Path | str:
    """The file of the one place where a text stands, or why there is none."""
    found = [path for path in sorted(src.rglob("*.py")) for _ in range(path.read_text("utf-8").count(right))]
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted({path.relative_to(src).as_posix() for path in found}))
    return f"its text stands in {len(found)} places: {names}" if found else "its text is nowhere in src"


def run(mistake: dict[str, str], copy: Path) -> tuple[str, str]:
    """FOUND where one of a mistake's tests fails in the copy, ESCAPED where all pass; and the first that fails."""
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
    """In a process of its own, which has what takes long to import, but for the project: run pytest in the copy."""
    with open(shown, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy / "src"))
    os.environ["PYTHONPATH"] = str(copy / "src")  # for processes that tests start
    code = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(code)


def play(mistake: dict[str, str], copy: Path) -> tuple[str, str]:
    """Put a mistake into the copy, run its tests, and take it out again."""
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
