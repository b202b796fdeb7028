"""Find the definition of a name of the library by reading its files. Nothing is imported, so no package is needed."""

import ast
import inspect
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parent.parent / "src"


class Definition(NamedTuple):
    """The definition of a class, function or constant at the top level of a module.

    Args:
        module: the module, such as fedbilevel.core.fed.
        name: the name in this module.
        node: the statement that defines it.
        text: the text under a constant; empty for a class or a function.
    """

    module: str
    name: str
    node: ast.stmt
    text: str = ""

    @property
    def path(self) -> str:
        """Return the module and the name as one text, such as fedbilevel.core.fed.Fed."""
        return f"{self.module}.{self.name}"


@cache
def definition(module: str, name: str) -> Definition | None:
    """Return the definition of a name in a module, even if the module imports it; None if it is not the library's."""
    if name in imports_of(module):
        return definition(*imports_of(module)[name])
    for node, after in pairwise([*tree_of(module).body, ast.Pass()]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Definition(module, name, node)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return Definition(module, name, node, text_of(after))
    return None


@cache
def imports_of(module: str) -> dict[str, tuple[str, str]]:
    """Return for each name that a module imports from another one (this module, the name there)."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, (node.module, alias.name))
    return found


@cache
def tree_of(module: str) -> ast.Module:
    """Return the statements of a module; none if the module is not in SOURCES."""
    place = SOURCES.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(file.read_text("utf-8") if file.is_file() else "")


def text_of(node: ast.stmt) -> str:
    """Return the text of a statement that consists of a string; "" for any other statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""
