"""Write the pages of docs/reference/api/: every public name with its signature, docstring and example.

Signatures and docstrings are those of `help()`. Examples are the cells of examples/api/api_NAME.py, each under the line
`# %% name` that says which entry it belongs to; the cell `# %% setup` stands at the head of its page.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.core import field_types

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference" / "api"
EXAMPLES = ROOT / "examples" / "api"
METHODS = "docs/reference/algorithms"


class Module(NamedTuple):
    """A public module; `needs`: packages of an extra without which it cannot be looked at."""

    name: str
    public: str
    intro: str
    needs: str = ""


MODULES = (
    Module(
        "fedbilevel",
        "fedbilevel.public",
        "What a program needs. `import fedbilevel as fb` loads each name on first use.",
    ),
    Module("fedbilevel.parts", "fedbilevel.parts", "Values for the fields of methods, and layers for `fb.layered`."),
    Module("fedbilevel.errors", "fedbilevel.errors", "Errors and warnings that the library raises on purpose."),
    Module(
        "fedbilevel.projections",
        "fedbilevel.core.projections",
        "Projections onto convex sets: each call returns a function that maps x to the nearest point of the set.",
    ),
    Module(
        "fedbilevel.estimators",
        "fedbilevel.estimators",
        "Linear models for tables of several sites, with scikit-learn's interface ([guide](../../how-to/tables.md)).",
        "sklearn",
    ),
    Module(
        "fedbilevel.authoring",
        "fedbilevel.authoring",
        "What a [method](../../how-to/own-method.md) or [layer](../../how-to/own-layer.md) of your own is made of, and "
        "the types of results.",
    ),
    Module(
        "fedbilevel.extending",
        "fedbilevel.extending",
        "Checks, words and files for a [package of your own](../extending.md).",
    ),
    Module(
        "fedbilevel.data", "fedbilevel.data", "Data sets, partitions and populations on disk ([guide](../data.md))."
    ),
    Module(
        "fedbilevel.flower",
        "fedbilevel.flower",
        "A federation over Flower ([guide](../../how-to/federation.md)).",
        "flwr",
    ),
    Module("fedbilevel.torch", "fedbilevel.torch", "Modules of PyTorch ([tutorial](../../tutorials/pytorch.md))."),
    Module(
        "fedbilevel.trackers",
        "fedbilevel.trackers",
        "Callbacks that record runs in services for experiments ([guide](../../how-to/trackers.md)).",
    ),
    Module(
        "fedbilevel.experiments",
        "fedbilevel.experiments",
        "What the [command line](../command-line.md) does, from Python: specs, run folders, comparisons.",
    ),
)
SECTIONS = {
    "fedbilevel.engines": "Running",
    "fedbilevel.sweeps": "Running",
    "fedbilevel.core.problem": "Problems",
    "fedbilevel.core": "Clients, metrics and terms",
    "fedbilevel.diagnostics": "Diagnostics",
    "fedbilevel.oracles": "Diagnostics",
    "fedbilevel.algorithms.parts": "Layers and wrappers",
    "fedbilevel.algorithms": "Methods",
}
"""The sections of the first page, in their order, by the room in which a name is defined."""
MEMBERS = {
    "Algorithm": "init round init_client validate check asks allows hypergradient_at finished findings remarks",
    "Client": "outer_batch inner_batch local_steps",
    "Clients": "split pooled",
    "Compressor": "coded",
    "ConfigurationError": "wrong",
    "CoxRegression": "fit predict score",
    "Dataset": "standardised",
    "Diagnosis": "fields rounds_needed safe_steps details mu smoothness condition",
    "Fed": "mean sum sum_first repeat repetition",
    "History": "columns measured per_client larger_is_better plot to_pandas to_jsonl from_jsonl",
    "InProcess": "join leave",
    "Layer": "before_round exchange reply after_round server_slot client_slot fits check asks allows findings remarks",
    "Ledger": "time gradients_per_client hvps_per_client",
    "Local": "forget keep_on_disk",
    "LogisticRegression": "fit predict predict_proba decision_function",
    "Packed": "client",
    "Preparer": "fit transform save load get_feature_names_out",
    "Privacy": "epsilon_after",
    "Ragged": "row",
    "Record": "add close",
    "RemoteClients": "of",
    "Result": "summary plot save load",
    "Ridge": "fit predict",
    "Spec": "replace",
    "Total": "mean",
    "Tracker": "open library",
}
"""The members of public classes that programs call or define; engines use others."""


class Entry(NamedTuple):
    """A public name: its signature (empty: none), docstring, defining module, members, and the class itself."""

    name: str
    signature: str
    doc: str
    room: str = ""
    members: tuple["Entry", ...] = ()
    cls: type | None = None


def written() -> Iterator[tuple[Path, str]]:
    """(file, its text) of the index and of each page; a page whose package is missing stays as it is."""
    places: dict[type, str] = {}
    rows = []
    for module in MODULES:
        file = PAGES / f"{module.name.rpartition('.')[2]}.md"
        if module.needs and find_spec(module.needs) is None:
            text = file.read_text("utf-8")
        else:
            text = page(module, file.name, places)
        entries = text.partition("<!-- entries -->")[2]
        sections = re.search(r"^### ", entries, re.MULTILINE)  # then names are headings of the third level
        names = re.findall(rf"^{'###' if sections else '##'} (\w+)$", entries, re.MULTILINE)
        rows.append(
            f"| [`{module.name}`]({file.name}) | {', '.join(f'[{n}]({file.name}#{n.lower()})' for n in names)} |"
        )
        yield file, text
    index = PAGES / "README.md"
    before, begin, rest = index.read_text("utf-8").partition("<!-- names: `make catalogue` writes this -->\n")
    after = rest.partition("<!-- end of names -->")[2]
    table = "\n".join(["| module | names |", "| --- | --- |", *rows])
    yield index, f"{before}{begin}\n{table}\n\n<!-- end of names -->{after}"


def page(module: Module, file: str, places: dict[type, str]) -> str:
    """The page of a module; `places` are the classes that earlier pages have, and where, and get this page's."""
    cells = examples(file.removesuffix(".md"))
    text = [f"# `{module.name}`\n", f"{module.intro} `make catalogue` writes this page from the code.\n"]
    if "setup" in cells:
        text += ["The examples of this page begin with these lines:\n", f"```python\n{cells.pop('setup')}\n```\n"]
    text.append("<!-- entries -->\n")
    entries = sorted((entry_of(module, name) for name in names_of(module)), key=lambda one: one.name[0].isupper())
    sections = list(dict.fromkeys(SECTIONS.values())) if module is MODULES[0] else [""]
    for section in sections:
        text += [f"## {section}\n"] if section else []
        for entry in entries:
            if not section or section == section_of(entry.room):
                text += shown(module, entry, cells.pop(entry.name, ""), file, places, "###" if section else "##")
    if cells:
        raise SystemExit(f"examples/api/api_{file.removesuffix('.md')}.py has cells of no entry: {', '.join(cells)}")
    return "\n".join(text)


def names_of(module: Module) -> list[str]:
    """The public names of a module, in the order of `__all__`, without the modules among them."""
    found = import_module(module.public)
    modules = {one.name for one in MODULES}
    return [name for name in found.__all__ if f"{module.name}.{name}" not in modules]


def section_of(room: str) -> str:
    """The section of the first page in which a name is listed, by the module that defines it."""
    return next(section for prefix, section in SECTIONS.items() if room.startswith(prefix))


def shown(module: Module, entry: Entry, example: str, file: str, places: dict[type, str], level: str) -> Iterator[str]:
    """The lines of an entry; one that stands on an earlier page is a link to it."""
    yield f"{level} {entry.name}\n"
    place = f"{file}#{entry.name.lower()}"
    if entry.cls and places.setdefault(entry.cls, place) != place:
        yield f"See [{entry.name}]({places[entry.cls]}).\n"
        return
    if entry.signature:
        yield f"```text\n{entry.signature}\n```\n"
    if entry.room.startswith("fedbilevel.algorithms.") and module is MODULES[0] and "parts" not in entry.room:
        yield f"{prose(entry.doc.partition(chr(10) * 2)[0])}\n"
        yield f"Fields, paper and costs: [its page](../algorithms/{method_page(entry.name)}).\n"
    else:
        yield markdown(entry.doc)
    if example:
        yield f"```python\n{example}\n```\n"
    for member in entry.members:
        yield f"**`{entry.name}.{member.name}{member.signature}`**\n"
        yield markdown(member.doc)


def method_page(name: str) -> str:
    """The page of docs/reference/algorithms whose heading names a class."""
    for file in sorted((ROOT / METHODS).glob("[a-z]*.md")):
        if name in re.findall(r"[\w-]+", file.read_text("utf-8").partition("\n")[0].replace("-", "")):
            return file.name
    raise SystemExit(f"no page of {METHODS} has a heading that names {name}")


def entry_of(module: Module, name: str) -> Entry:
    """The entry of a public name."""
    if module.name == "fedbilevel.torch":
        return unloaded(ROOT / "src/fedbilevel/torch/bridge.py", name)
    value = getattr(import_module(module.public), name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return Entry(name, "", constant(module.public, name), module.public)
    doc = inspect.getdoc(value) or ""
    if inspect.isfunction(value):
        return Entry(name, signature_of(name, value), doc, value.__module__)
    if issubclass(value, BaseException):
        signature = f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
    else:
        signature = "" if getattr(value, "_is_protocol", False) else signature_of(name, value)
    return Entry(name, signature, doc + fields_of_bases(value, doc), value.__module__, tuple(members(value)), value)


def fields_of_bases(cls: type, doc: str) -> str:
    """The section "Args:" of the nearest base that has one, and what follows it, where the class has none itself."""
    bases = [inspect.getdoc(base) or "" for base in cls.__mro__[1:] if base.__module__.startswith("fedbilevel.")]
    found = next((base for base in bases if "\nArgs:" in base), "")
    return f"\n\n{found[found.index('Args:') :]}" if found and "Args:" not in doc else ""


def members(cls: type) -> Iterator[Entry]:
    """The members of a class that MEMBERS names: methods with their arguments, and properties."""
    for name in MEMBERS.get(cls.__name__, "").split():
        value = inspect.getattr_static(cls, name)
        function, doc = getattr(value, "__func__", value), inspect.getdoc(getattr(cls, name)) or ""
        called = inspect.isfunction(function)
        yield Entry(name, arguments(function, bound=not isinstance(value, staticmethod)) if called else "", doc)


def unloaded(file: Path, name: str) -> Entry:
    """The entry of a function of a file that is read and not run, as its package may be missing."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return Entry(name, f"{name}({ast.unparse(node.args)}){returns}", ast.get_docstring(node) or "")
    raise SystemExit(f"{file} does not define {name}")


def constant(module: str, name: str) -> str:
    """The text under the assignment of a constant, in the file where the module has it from."""
    spec = find_spec(module)
    nodes = list(ast.walk(ast.parse(Path(str(spec and spec.origin)).read_text("utf-8"))))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return constant(node.module, name)
    for body in (getattr(node, "body", None) for node in nodes):
        for line, after in pairwise(body) if isinstance(body, list) else ():
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                text = getattr(getattr(after, "value", None), "value", "")
                return inspect.cleandoc(text) if isinstance(text, str) else ""
    return ""


def signature_of(name: str, value: Any) -> str:
    """The call of a class or function, an argument a line where it is long."""
    inside, returns = arguments(value).removeprefix("("), ""
    inside, _, returns = inside.rpartition(")")
    whole = f"{name}({inside}){returns}"
    if inspect.isclass(value):
        whole, returns = f"{name}({inside})", ""
    if len(whole) <= 110:
        return whole
    return f"{name}(\n" + "".join(f"    {one},\n" for one in split(inside)) + f"){returns}"


def split(inside: str) -> list[str]:
    """The arguments of a call, cut at the commas outside of brackets."""
    found, depth = [""], 0
    for character in inside:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [one.strip() for one in found]


def arguments(value: Any, bound: bool = False) -> str:
    """The arguments of a function or class, and what a function returns, with types as the source has them.

    Evaluated types are written in other ways by each version of Python and NumPy.
    """
    types = types_of(value)
    parameters = [
        one.replace(default=plain(one.default), annotation=types.get(name, one.empty))
        for name, one in inspect.signature(value).parameters.items()
    ][bound:]
    returns = types.get("return", inspect.Signature.empty)
    text = str(inspect.Signature(parameters, return_annotation=returns))
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z]\w+|ndarray)", "", text)


def types_of(value: Any) -> dict[str, "Written"]:
    """The source text of the type of each argument by its name, and of the result as "return"."""
    if not inspect.isclass(value):
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(value)))).body[0]
        assert isinstance(function, ast.FunctionDef)
        return types_of_function(function)
    found = {}
    for base in reversed([base for base in value.__mro__ if base.__module__.startswith("fedbilevel.")]):
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = Written(held(ast.unparse(node.annotation)))
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found |= types_of_function(node)
    found.pop("return", None)
    return found


def held(annotation: str) -> str:
    """The type that a field of a method holds, where its annotation also says what it accepts."""
    kind = vars(field_types).get(annotation)
    return annotation if kind is None else getattr(kind, "__name__", str(kind))


def types_of_function(function: ast.FunctionDef) -> dict[str, "Written"]:
    """The same of a function's definition."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    found = {one.arg: Written(ast.unparse(one.annotation)) for one in every if one.annotation}
    return found | ({"return": Written(ast.unparse(function.returns))} if function.returns else {})


class Written:
    """A default value or a type that is written as this text."""

    def __init__(self, text: str) -> None:
        self.text = text.strip("'\"")

    def __repr__(self) -> str:
        return self.text


def plain(default: Any) -> Any:
    """The default, or three dots where its text is long or says where it is in memory."""
    text = repr(default)
    dots = default is not inspect.Parameter.empty and ("<" in text or len(text) > 60)
    return Written("…") if dots else default


def markdown(doc: str) -> str:
    """A docstring as Markdown: sections such as "Args:" become lists."""
    text = []
    for block in re.split(r"\n\n+", doc.strip()):
        head, _, body = block.partition("\n")
        if head == "Returns:" and not re.match(r" +\w+: ", body):
            text.append(f"Returns: {prose(' '.join(body.split()))}")
        elif head in ("Args:", "Raises:", "Returns:", "Attributes:", "Yields:"):
            found = re.findall(r"^    (\S.*(?:\n {5,}.*)*)", body, re.MULTILINE)
            text.append(f"{head.removesuffix(':').replace('Args', 'Arguments')}:\n\n" + "\n".join(map(item, found)))
        elif block.startswith("    "):
            text.append(block)
        else:
            text.append(prose(block))
    return "\n\n".join(text) + "\n"


def item(text: str) -> str:
    """An entry of a section as an item of a list, with its name as code."""
    name, colon, rest = " ".join(text.split()).partition(": ")
    return (
        f"- `{name}`: {prose(rest)}"
        if colon and re.fullmatch(r"[\w, *.]+", name)
        else f"- {prose(name + colon + rest)}"
    )


def prose(text: str) -> str:
    """Text without characters that Markdown would read as marks, but for code between backquotes."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<\[])", r"\\\1", part) for part in parts)


def examples(name: str) -> dict[str, str]:
    """The cells of a file of examples by the names that head them."""
    file = EXAMPLES / f"api_{name}.py"
    cells = re.split(r"^# %% (\w+)\n", file.read_text("utf-8"), flags=re.MULTILINE) if file.is_file() else [""]
    return {name: text.strip() for name, text in zip(cells[1::2], cells[2::2], strict=True)}
