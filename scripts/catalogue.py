"""Write the texts that are generated from methods, tasks and helpers.

`make catalogue` runs this script, and a test checks that the texts are up to date.

These texts are the list of classes in algorithms/__init__.py, and the parts of pages in docs/ between two markers.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import optax

sys.path.insert(0, str(Path(__file__).parent))  # needed if a test runs this file
import api

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "src" / "fedbilevel" / "algorithms"
PAGES = ROOT / "docs" / "reference" / "algorithms"
KINDS = {
    "Bilevel": (
        "x sets how y is trained with the loss g; the best x gives the trained y the smallest loss f",
        "Bilevel(f, g)",
    ),
    "Minimax": ("minimise one loss over x, while y maximises it", "Minimax(f)"),
    "Compositional": ("a non-linear function f of a mean of r over all clients", "Compositional(f, r)"),
    "SimpleBilevel": (
        "among the many x in a set X that minimise the mean of f over all clients, find the x with the smallest H(x); "
        "`project` projects onto X",
        "SimpleBilevel(H, f, project)",
    ),
    "SingleLevel": ("one loss with one variable", "SingleLevel(f)"),
}
"""The kinds of problem -> (what it is for, how it is stated)."""


PARTS_OF_METHODS = ("fedbilevel.core", "fedbilevel.oracles", "fedbilevel.algorithms.parts")
"""The packages with the helpers of methods. All other names of `authoring` are types of results."""


def written() -> Iterator[tuple[Path, str]]:
    """Yield (file, its text) for everything that is generated.

    The list of classes comes first, since the others import it.
    """
    yield METHODS / "__init__.py", listed()
    reference = api.Reference()
    kinds, costs, index = tables()
    yield (
        PAGES / "README.md",
        between(between((PAGES / "README.md").read_text("utf-8"), "methods", index), "parts", parts()),
    )
    for page, classes in pages().items():
        yield page, between(page.read_text("utf-8"), "method", method(classes, reference))
    for page, name, text in (
        ("how-to/choosing.md", "kinds", kinds),
        ("reference/costs.md", "costs", costs),
        ("how-to/own-method.md", "helpers", helpers()),
        ("reference/extending.md", "extending", listing("extending")),
        ("reference/tasks.md", "tasks", tasks()),
    ):
        file = ROOT / "docs" / page
        yield file, between(file.read_text("utf-8"), name, text)
    yield from api.written(reference)


def listed() -> str:
    """Return the text of algorithms/__init__.py, which lists every class of the package that sets `name`.

    The files are read, and not imported.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(METHODS.glob("[!_]*.py")):
        classes = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
        found[file.stem] = sorted((one.name for one in classes if _sets_name(one)), key=_place)
    names = sorted((name for names in found.values() for name in names), key=_place)
    return "\n".join(
        [
            '"""Published methods, one file per paper, under one contract: a list that `make catalogue` writes."""\n',
            *(f"from fedbilevel.algorithms.{file} import {', '.join(names)}" for file, names in found.items() if names),
            "from fedbilevel.core.algorithm import ALGORITHMS as ALGORITHMS\n",
            "__all__ = [",
            *(f'    "{name}",' for name in names),
            "]\n",
        ]
    )


def _sets_name(cls: ast.ClassDef) -> bool:
    targets = (target for node in cls.body if isinstance(node, ast.Assign) for target in node.targets)
    return any(isinstance(target, ast.Name) and target.id == "name" for target in targets)


def _place(name: str) -> tuple[bool, str]:
    """Return a key by which names are sorted as ruff sorts imports: capitals first."""
    return not name.isupper(), name


def tables() -> tuple[str, str, str]:
    """Return three tables: which methods solve which kind of problem, what a round costs, and the index of pages."""
    from fedbilevel.algorithms import ALGORITHMS

    heads = {page: page.read_text("utf-8").partition("\n")[0] for page in sorted(PAGES.glob("[a-z]*.md"))}
    solvers: dict[str, list[str]] = {kind: [] for kind in KINDS}
    costs, index = [], []
    for cls in sorted((one for one in ALGORITHMS.values() if one.__module__.startswith("fedbilevel.")), key=_by_page):
        facts, kinds = cls.facts, [kind.__name__ for kind in cls.solves]
        page, label = _page(cls.__name__, heads)
        for kind in kinds:
            solvers[kind].append(label)
        costs.append((f"[{label}](algorithms/{page})", facts.exchanges, facts.up, facts.hvps, facts.bias))
        able = [cls().allows.late, cls().allows.submodels, cls.estimates_hypergradient()]
        marks = ("yes" if has else "–" for has in able)
        index.append((f"[{label}]({page})", f"`{cls.name}`", ", ".join(kinds), *marks, _sentence(cls).rstrip(".")))
    by_kind = [(text, f"`{call}`", ", ".join(solvers[kind])) for kind, (text, call) in KINDS.items()]
    wrappers = ("`Asynchronous`", "`Submodels`")
    return (
        table(("problem", "state it as", "methods"), by_kind),
        table(("method", "exchanges per round", "vectors that a client sends", "hvps of a client", "bias"), costs),
        table(("method", "`--algorithm`", "problems", *wrappers, "estimates ∇Φ", "in one line"), index),
    )


def _by_page(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__name__


def _page(name: str, heads: dict[Path, str]) -> tuple[str, str]:
    """Return the page whose heading names a class, and the spelling there, such as FedNest-SGD for FedNestSGD."""
    for page, head in heads.items():
        for word in re.findall(r"[\w-]+", head):
            if word.replace("-", "") == name:
                return page.name, word
    raise SystemExit(f"no page of {PAGES} has a heading that names {name}")


def pages() -> dict[Path, list[type]]:
    """Return the pages of methods, each with the classes that its heading names, in this order."""
    from fedbilevel.algorithms import ALGORITHMS

    ours = {cls.__name__: cls for cls in ALGORITHMS.values() if cls.__module__.startswith("fedbilevel.")}
    found = {}
    for page in sorted(PAGES.glob("[a-z]*.md")):
        words = re.findall(r"[\w-]+", page.read_text("utf-8").partition("\n")[0])
        found[page] = [ours[name] for word in words if (name := word.replace("-", "")) in ours]
    return found


def method(classes: list[type], reference: api.Reference) -> str:
    """Return the docstring of the module of some classes, without its paragraph on tests, and a table of fields."""

    def linked(text: str) -> str:
        return re.sub(r"`[^`]*`", lambda code: reference.link(code[0], "../api/"), text)

    said = (inspect.getdoc(inspect.getmodule(classes[0])) or "").partition("\n\nChecked in ")[0]
    said = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", said)
    said = re.sub(r"docs/([\w/-]+\.md)", r"[docs/\1](../../\1)", said)
    fields: dict[tuple[str, str, str], list[str]] = {}
    for cls in classes:
        for name, text in _entries(inspect.getdoc(cls) or "").items():
            default = _default(cls, name)
            fields.setdefault((name, default, text), []).append(cls.__name__)
    rows = [
        (
            f"`{name}`" + ("" if len(having) == len(classes) else f" ({', '.join(having)})"),
            linked(default),
            linked(text),
        )
        for (name, default, text), having in fields.items()
    ]
    return f"{said}\n\n" + table(("field", "default", "what it is"), rows)


def _entries(docstring: str) -> dict[str, str]:
    """Return the entries of the section "Args:" of a docstring: name -> text in one line."""
    section = re.search(r"^Args:\n((?:    .*\n?)+)", docstring, re.MULTILINE)
    entries = re.findall(r"^    (\w+): ((?:.|\n        )*)", section[1], re.MULTILINE) if section else []
    return {name: " ".join(text.split()) for name, text in entries}


def _default(cls: type, name: str) -> str:
    """Return the default of a field as a text of Python; "" if there is none. Of a part, only the class is shown."""
    value = getattr(cls, name, dataclasses.MISSING)
    if value is dataclasses.MISSING:
        return ""
    from fedbilevel.core.tree import XYV

    if isinstance(value, optax.GradientTransformation):
        return "plain descent"
    if isinstance(value, XYV) or not dataclasses.is_dataclass(value):
        return f"`{value!r}`"
    return f"`{type(value).__name__}()`"


def parts() -> str:
    """Return a list of the parts that fields may have as values, with the first sentence of each docstring."""
    from fedbilevel import parts

    return table(("part", "what it is"), [(f"`{name}`", _sentence(getattr(parts, name))) for name in parts.__all__])


def _sentence(value: object) -> str:
    """Return the first sentence of an object's docstring."""
    return " ".join(re.split(r"(?<=\.)\s", inspect.getdoc(value) or "")[0].split())


def helpers() -> str:
    """Return a list of the helpers in `fedbilevel.authoring`, with arguments and first sentences of docstrings."""
    return listing("authoring", PARTS_OF_METHODS)


def listing(module: str, of: str | tuple[str, ...] = "") -> str:
    """Return a list of a module's public names that packages `of` define, with arguments and first sentences."""
    public, rows = import_module(f"fedbilevel.{module}"), []
    for name in public.__all__:
        value = getattr(public, name)
        if getattr(value, "__module__", "").startswith(of):
            arguments = f"({', '.join(_arguments(value))})" if inspect.isfunction(value) else ""
            rows.append((f"`{name}{arguments}`", _sentence(value)))
    return table(("helper", "what it is"), rows)


def _arguments(function: Callable[..., object]) -> Iterator[str]:
    """Yield the names of a function's parameters. A star precedes the parameters that must be passed by name."""
    starred = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield name


def tasks() -> str:
    """Return a section for each task, with the docstring of the task's module."""
    from fedbilevel import tasks

    functions = [value for name in tasks.__all__ if inspect.isfunction(value := getattr(tasks, name))]
    return "\n\n".join(f"## {task.__name__}\n\n{inspect.getdoc(inspect.getmodule(task))}" for task in functions)


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ("---",) * len(heads), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def between(page: str, name: str, text: str) -> str:
    """Return the text of a page with `text` between the markers of this name."""
    begin, end = f"<!-- {name}: `make catalogue` writes this -->\n\n", f"\n\n<!-- end of {name} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"a page lacks the markers {begin.strip()} and {end.strip()}")
    return before + begin + text + end + after


if __name__ == "__main__":
    for file, text in written():
        file.write_text(text, "utf-8")
