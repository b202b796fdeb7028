"""A name has one meaning: no two classes or type aliases of the package have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "fedbilevel"
OF_EACH_METHOD = {"State", "ClientState"}
"""Names that the file of each method may define."""


def named(tree: ast.Module) -> list[str]:
    """Return the names of all classes of a file, and of its top-level type aliases, which begin with a capital."""
    found = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        found += [name for name in names if name[0].isupper() and not name.isupper()]
    return found


def shared(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the names that several files define, with the paths of these files.

    `sources` has the text of each file by its path.
    """
    where: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for name in named(ast.parse(source)):
            where[name].append(path)
    return {name: paths for name, paths in where.items() if len(paths) > 1 and name not in OF_EACH_METHOD}


def test_no_two_classes_or_aliases_have_one_name() -> None:
    sources = {str(file.relative_to(PACKAGE)): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    found = shared(sources)
    assert found == {}


def test_the_check_finds_classes_and_aliases() -> None:
    class_, alias = "class Plan:\n    class Row: ...", "from typing import Any\nRow = dict[str, Any]\nLIMIT = 3"
    assert shared({"a.py": class_, "b.py": alias}) == {"Row": ["a.py", "b.py"]}
    assert shared({"a.py": class_, "b.py": class_}).keys() == {"Plan", "Row"}
    assert shared({"a.py": "LIMIT = 1\nclass State: ...", "b.py": "LIMIT = 2\nclass State: ..."}) == {}
