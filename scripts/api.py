"""Write the pages of docs/reference/api/: every public name with its signature, docstring and example.

Signatures and docstrings are those of `help()`. Examples are the cells of examples/api/api_NAME.py, each under the line
`# %% name` that says which entry it belongs to; the cell `# %% setup` stands at the head of its page.

Under a signature is a line of links to its types, and public names between backquotes are links. The page types.md
describes the types of the library that signatures name and no module exports.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.core import field_types

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "docs" / "website")]  # also where a test runs this file
from definitions import Definition, definition  # noqa: E402
from names import entries  # noqa: E402
from names import entry_of as entry_in_code  # noqa: E402

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


INDEX, TYPES = PAGES / "README.md", PAGES / "types.md"


class Entry(NamedTuple):
    """A name of the API reference.

    Args:
        name: the name.
        signature: its call, or the assignment of a type; empty: none.
        doc: its docstring.
        rooms: the modules that may define the types in the signature; the first defines the name.
        members: the entries of members.
        path: module and name of a class.
    """

    name: str
    signature: str
    doc: str
    rooms: tuple[str, ...] = ("",)
    members: tuple["Entry", ...] = ()
    path: str = ""


class Reference:
    """The entries of all modules whose packages are installed, and where each type and each name is described."""

    def __init__(self) -> None:
        """Read all modules, then follow the types in signatures until each of them has a place."""
        self.modules = {one: entries_of(one) for one in MODULES if not (one.needs and find_spec(one.needs) is None)}
        self.places: dict[str, str] = {}
        for module, found in self.modules.items():
            for entry in found:
                if entry.path:
                    self.places.setdefault(entry.path, f"{file_of(module)}#{entry.name.lower()}")
        self.types: list[Entry] = []
        waiting = [entry for found in self.modules.values() for entry in found]
        while waiting:
            entry = waiting.pop()
            waiting += entry.members
            for found in types_in(entry):
                if found.path not in self.places:
                    self.places[found.path] = f"{TYPES.name}#{found.name.lower()}"
                    self.types.append(entry_of_type(found))
                    waiting.append(self.types[-1])
        self.types.sort(key=lambda entry: entry.name.lower())
        self.complete = len(self.modules) == len(MODULES)
        self.index = index(self)
        self.names = entries(self.index)

    def types_line(self, entry: Entry) -> Iterator[str]:
        """A line of links to the types that a signature names; none where it names none of the library."""
        links = [f"[`{found.name}`]({self.places[found.path]})" for found in types_in(entry)]
        if links:
            yield f"Types: {', '.join(links)}\n"

    def link(self, code: str, folder: str = "", name: str = "") -> str:
        """Make code between backquotes a link if it is a name of the reference, but not the name of its section."""
        found = entry_in_code(code.strip("`"), self.names)
        if found is None or found.anchor == name.lower():
            return code
        return f"[{code}]({folder}{found.page.rpartition('/')[2]}.md#{found.anchor})"


def written(reference: Reference) -> Iterator[tuple[Path, str]]:
    """(file, its text) of the index and of each page; a page whose package is missing stays as it is."""
    yield INDEX, reference.index
    for module in reference.modules:
        yield PAGES / file_of(module), page(module, reference)
    if reference.complete:
        yield TYPES, page_of_types(reference)


def index(reference: Reference) -> str:
    """The first page, with the table of all names."""
    rows = []
    for module in MODULES:
        file = file_of(module)
        if found := reference.modules.get(module):
            listed = [entry.name for _, section in sections_of(module, found) for entry in section]
        else:
            listed = names_on((PAGES / file).read_text("utf-8"))
        rows.append(row(module.name, file, listed))
    types = [entry.name for entry in reference.types] if reference.complete else names_on(TYPES.read_text("utf-8"))
    rows.append(row("types", TYPES.name, types))
    before, begin, rest = INDEX.read_text("utf-8").partition("<!-- names: `make catalogue` writes this -->\n")
    after = rest.partition("<!-- end of names -->")[2]
    table = "\n".join(["| module | names |", "| --- | --- |", *rows])
    return f"{before}{begin}\n{table}\n\n<!-- end of names -->{after}"


def file_of(module: Module) -> str:
    """The page of a module."""
    return f"{module.name.rpartition('.')[2]}.md"


def row(name: str, file: str, listed: list[str]) -> str:
    """The row of a page in the index."""
    return f"| [`{name}`]({file}) | {', '.join(f'[{one}]({file}#{one.lower()})' for one in listed)} |"


def names_on(text: str) -> list[str]:
    """The names of the entries of a page that stays as it is."""
    shown = text.partition("<!-- entries -->")[2]
    sections = re.search(r"^### ", shown, re.MULTILINE)  # then names are headings of the third level
    return re.findall(rf"^{'###' if sections else '##'} (\w+)$", shown, re.MULTILINE)


def page(module: Module, reference: Reference) -> str:
    """The page of a module."""
    cells = examples(file_of(module).removesuffix(".md"))
    text = [f"# `{module.name}`\n", f"{module.intro} `make catalogue` writes this page from the code.\n"]
    if "setup" in cells:
        text += ["The examples of this page begin with these lines:\n", f"```python\n{cells.pop('setup')}\n```\n"]
    text.append("<!-- entries -->\n")
    for section, found in sections_of(module, reference.modules[module]):
        text += [f"## {section}\n"] if section else []
        for entry in found:
            level = "###" if section else "##"
            text += shown(module, entry, cells.pop(entry.name, ""), reference, level)
    if cells:
        raise SystemExit(f"examples/api/api_{file_of(module)[:-3]}.py has cells of no entry: {', '.join(cells)}")
    return "\n".join(text)


def sections_of(module: Module, found: list[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """The sections of a page with their entries; all but the first page have one section without a title."""
    if module is not MODULES[0]:
        yield "", found
        return
    for section in dict.fromkeys(SECTIONS.values()):
        yield section, [entry for entry in found if section_of(entry.rooms[0]) == section]


def page_of_types(reference: Reference) -> str:
    """The page of the types that signatures name and no module exports."""
    text = [
        "# Types in signatures\n",
        "Signatures of the API reference also name these types. Programs get objects of the classes from functions and "
        "methods, and need not import them: the modules that define them may change. `make catalogue` writes this page "
        "from the code.\n",
        "<!-- entries -->\n",
    ]
    for entry in reference.types:
        text += [f"## {entry.name}\n", *body(entry, reference)]
    return "\n".join(text)


def names_of(module: Module) -> list[str]:
    """The public names of a module, in the order of `__all__`, without the modules among them."""
    found = import_module(module.public)
    modules = {one.name for one in MODULES}
    return [name for name in found.__all__ if f"{module.name}.{name}" not in modules]


def section_of(room: str) -> str:
    """The section of the first page in which a name is listed, by the module that defines it."""
    return next(section for prefix, section in SECTIONS.items() if room.startswith(prefix))


def shown(module: Module, entry: Entry, example: str, reference: Reference, level: str) -> Iterator[str]:
    """The lines of an entry; one that stands on an earlier page is a link to it."""
    yield f"{level} {entry.name}\n"
    place = f"{file_of(module)}#{entry.name.lower()}"
    if entry.path and reference.places[entry.path] != place:
        yield f"See [{entry.name}]({reference.places[entry.path]}).\n"
        return
    room = entry.rooms[0]
    if room.startswith("fedbilevel.algorithms.") and module is MODULES[0] and "parts" not in room:
        yield from signature(entry, reference)
        yield markdown(entry.doc.partition("\n\n")[0], lambda code: reference.link(code, name=entry.name))
        yield f"Fields, paper and costs: [its page](../algorithms/{method_page(entry.name)}).\n"
    else:
        yield from body(entry, reference)
    if example:
        yield f"```python\n{example}\n```\n"
    for member in entry.members:
        yield f"**`{entry.name}.{member.name}{member.signature}`**\n"
        yield from reference.types_line(member)
        yield markdown(member.doc, lambda code: reference.link(code, name=entry.name))


def body(entry: Entry, reference: Reference) -> Iterator[str]:
    """The signature of an entry with its types, and the docstring."""
    yield from signature(entry, reference)
    if entry.doc:
        yield markdown(entry.doc, lambda code: reference.link(code, name=entry.name))


def signature(entry: Entry, reference: Reference) -> Iterator[str]:
    """The signature of an entry and the line of its types."""
    if entry.signature:
        yield f"```text\n{entry.signature}\n```\n"
        yield from reference.types_line(entry)


def method_page(name: str) -> str:
    """The page of docs/reference/algorithms whose heading names a class."""
    for file in sorted((ROOT / METHODS).glob("[a-z]*.md")):
        if name in re.findall(r"[\w-]+", file.read_text("utf-8").partition("\n")[0].replace("-", "")):
            return file.name
    raise SystemExit(f"no page of {METHODS} has a heading that names {name}")


def entries_of(module: Module) -> list[Entry]:
    """The entries of a module: functions and constants, then classes."""
    return sorted((entry_of(module, name) for name in names_of(module)), key=lambda one: one.name[0].isupper())


def entry_of(module: Module, name: str) -> Entry:
    """The entry of a public name."""
    if module.name == "fedbilevel.torch":
        return unloaded(f"{module.public}.bridge", name)
    value = getattr(import_module(module.public), name)
    if inspect.isclass(value):
        return entry_of_class(value)
    if inspect.isfunction(value):
        return Entry(name, signature_of(name, value), inspect.getdoc(value) or "", rooms_of(value))
    found = definition(module.public, name)
    return Entry(name, "", found.text if found else "", (module.public,))


def entry_of_class(cls: type) -> Entry:
    """The entry of a class."""
    name, doc = cls.__name__, inspect.getdoc(cls) or ""
    if issubclass(cls, BaseException):
        signature = f"class {name}({', '.join(base.__name__ for base in cls.__bases__)})"
    elif getattr(cls, "_is_protocol", False) or issubclass(cls, Enum):
        signature = ""
    else:
        signature = signature_of(name, cls)
    path = f"{cls.__module__}.{name}"
    return Entry(name, signature, doc + fields_of_bases(cls, doc), rooms_of(cls), tuple(members(cls)), path)


def entry_of_type(found: Definition) -> Entry:
    """The entry of a type that no module exports: a class, or a name for a type."""
    if isinstance(found.node, ast.ClassDef):
        return entry_of_class(getattr(import_module(found.module), found.name))
    return Entry(found.name, ast.unparse(found.node), found.text, (found.module,))


def rooms_of(value: Any) -> tuple[str, ...]:
    """The modules that define a function, or a class and its bases, as far as they are the library's."""
    classes = value.__mro__ if inspect.isclass(value) else [inspect.unwrap(value)]
    return tuple(dict.fromkeys(one.__module__ for one in classes if one.__module__.startswith("fedbilevel.")))


def types_in(entry: Entry) -> Iterator[Definition]:
    """The types of the library that a signature names, each once, in their order."""
    for name in dict.fromkeys(re.findall(r"\b[A-Z]\w+", entry.signature)):
        found = next(filter(None, (definition(room, name) for room in entry.rooms)), None)
        if found and found.name != entry.name:
            yield found


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
        if inspect.isfunction(function):
            call = arguments(function, bound=not isinstance(value, staticmethod))
            yield Entry(name, call, doc, rooms_of(function))
        else:
            yield Entry(name, "", doc)


def unloaded(module: str, name: str) -> Entry:
    """The entry of a function of a module that is read and not run, as its package may be missing."""
    found = definition(module, name)
    if found is None or not isinstance(found.node, ast.FunctionDef):
        raise SystemExit(f"{module} does not define {name}")
    returns = f" -> {ast.unparse(found.node.returns)}" if found.node.returns else ""
    call = f"{name}({ast.unparse(found.node.args)}){returns}"
    return Entry(name, call, ast.get_docstring(found.node) or "", (module,))


def signature_of(name: str, value: Any) -> str:
    """The call of a class or function, an argument a line where it is long."""
    inside, returns = arguments(value).removeprefix("("), ""
    inside, _, returns = inside.rpartition(")")
    whole = f"{name}({inside}){returns}"
    if inspect.isclass(value):
        whole, returns = f"{name}({inside})", ""
    if len(whole) <= 90:
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


def markdown(doc: str, link: Callable[[str], str] = str) -> str:
    """A docstring as Markdown: sections such as "Args:" become lists, and `link` gets each piece of code."""
    text = []
    for block in re.split(r"\n\n+", doc.strip()):
        head, _, body = block.partition("\n")
        if head == "Returns:" and not re.match(r" +\w+: ", body):
            text.append(f"Returns: {prose(' '.join(body.split()), link)}")
        elif head in ("Args:", "Raises:", "Returns:", "Attributes:", "Yields:"):
            found = re.findall(r"^    (\S.*(?:\n {5,}.*)*)", body, re.MULTILINE)
            items = "\n".join(item(text, link) for text in found)
            text.append(f"{head.removesuffix(':').replace('Args', 'Arguments')}:\n\n{items}")
        elif block.startswith("    "):
            text.append(block)
        else:
            text.append(prose(block, link))
    return "\n\n".join(text) + "\n"


def item(text: str, link: Callable[[str], str]) -> str:
    """An entry of a section as an item of a list, with its name as code."""
    name, colon, rest = " ".join(text.split()).partition(": ")
    if not (colon and re.fullmatch(r"[\w, *.]+", name)):
        return f"- {prose(name + colon + rest, link)}"
    return f"- {link(f'`{name}`') if name[0].isupper() else f'`{name}`'}: {prose(rest, link)}"


def prose(text: str, link: Callable[[str], str]) -> str:
    """Text without characters that Markdown would read as marks, but for code between backquotes."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(link(part) if part.startswith("`") else re.sub(r"([*<\[])", r"\\\1", part) for part in parts)


def examples(name: str) -> dict[str, str]:
    """The cells of a file of examples by the names that head them."""
    file = EXAMPLES / f"api_{name}.py"
    cells = re.split(r"^# %% (\w+)\n", file.read_text("utf-8"), flags=re.MULTILINE) if file.is_file() else [""]
    return {name: text.strip() for name, text in zip(cells[1::2], cells[2::2], strict=True)}
