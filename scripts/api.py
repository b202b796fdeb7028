"""Write the pages of docs/reference/api/: every public name with its signature, docstring and example.

Signatures and docstrings are the same as in `help()`. Examples are the cells of the files examples/api/api_NAME.py. The
line `# %% name` before a cell says to which entry it belongs. The cell `# %% setup` is shown at the beginning of the
page.

Under each signature there is a line of links to its types. Public names between backquotes become links. The page
types.md describes types of the library that occur in signatures and that no module exports.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.core import field_types

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "docs" / "website")]  # needed if a test runs this file
from definitions import Definition, definition, tree_of  # noqa: E402
from names import entries  # noqa: E402
from names import entry_of as entry_in_code  # noqa: E402

PAGES = ROOT / "docs" / "reference" / "api"
EXAMPLES = ROOT / "examples" / "api"
METHODS = "docs/reference/algorithms"


class Module(NamedTuple):
    """A public module. `needs` are packages of an extra without which the module cannot be imported."""

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
"""The sections of the first page, in their order: the room in which a name is defined -> the title of its section."""
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
"""The members of public classes that are documented, since programs call or define them. (Engines also use others.)"""


INDEX, TYPES = PAGES / "README.md", PAGES / "types.md"


class Entry(NamedTuple):
    """An entry of the API reference.

    Args:
        name: the name.
        signature: how the name is called, or the assignment of a type; empty: there is no signature.
        doc: the docstring.
        rooms: the modules that may define the types in the signature; the first module defines the name itself.
        members: the entries of the members of a class.
        path: the module and the name of a class.
    """

    name: str
    signature: str
    doc: str
    rooms: tuple[str, ...] = ("",)
    members: tuple["Entry", ...] = ()
    path: str = ""


class Reference:
    """The entries of modules whose packages are installed, and the pages that describe each type and name.

    Args:
        modules: the modules; None: all public ones.
    """

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        """Read the modules. Then follow the types in signatures, until each type has a page."""
        read = MODULES if modules is None else modules
        self.modules = {one: entries_of(one) for one in read if not (one.needs and find_spec(one.needs) is None)}
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
        """Yield a line of links to the types in a signature; yield nothing if no type is the library's."""
        links = [f"[`{found.name}`]({self.places[found.path]})" for found in types_in(entry)]
        if links:
            yield f"Types: {', '.join(links)}\n"

    def link(self, code: str, folder: str = "", name: str = "") -> str:
        """Return code between backquotes, as a link if it is a name of the reference and not this section's name."""
        found = entry_in_code(code.strip("`"), self.names)
        if found is None or found.anchor == name.lower():
            return code
        return f"[{code}]({folder}{found.page.rpartition('/')[2]}.md#{found.anchor})"


def written(reference: Reference) -> Iterator[tuple[Path, str]]:
    """Yield (file, its text) for the index and each page.

    If a page's package is not installed, its page does not change.
    """
    yield INDEX, reference.index
    for module in reference.modules:
        yield PAGES / file_of(module), page(module, reference)
    if reference.complete:
        yield TYPES, page_of_types(reference)


def index(reference: Reference) -> str:
    """Return the text of the first page, with the table of all names."""
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
    """Return the name of the file with a module's page."""
    return f"{module.name.rpartition('.')[2]}.md"


def row(name: str, file: str, listed: list[str]) -> str:
    """Return the row of a page in the index."""
    return f"| [`{name}`]({file}) | {', '.join(f'[{one}]({file}#{one.lower()})' for one in listed)} |"


def names_on(text: str) -> list[str]:
    """Return the names of the entries of a page that does not change."""
    shown = text.partition("<!-- entries -->")[2]
    sections = re.search(r"^### ", shown, re.MULTILINE)  # if there are sections, names are headings of the third level
    return re.findall(rf"^{'###' if sections else '##'} (\w+)$", shown, re.MULTILINE)


def page(module: Module, reference: Reference) -> str:
    """Return the text of a module's page."""
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
    """Yield the sections of a page, with their entries.

    Only the first page has several; other pages have one section without a title.
    """
    if module is not MODULES[0]:
        yield "", found
        return
    for section in dict.fromkeys(SECTIONS.values()):
        yield section, [entry for entry in found if section_of(entry.rooms[0]) == section]


def page_of_types(reference: Reference) -> str:
    """Return the text of the page of types that occur in signatures and that no module exports."""
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
    """Return the public names of a module in the order of `__all__`, without names of modules."""
    found = import_module(module.public)
    modules = {one.name for one in MODULES}
    return [name for name in found.__all__ if f"{module.name}.{name}" not in modules]


def section_of(room: str) -> str:
    """Return the section of the first page to which a name belongs; `room` is the module that defines the name."""
    return next(section for prefix, section in SECTIONS.items() if room.startswith(prefix))


def shown(module: Module, entry: Entry, example: str, reference: Reference, level: str) -> Iterator[str]:
    """Yield the lines of an entry. If an earlier page has the entry, this is a link."""
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
    """Yield the signature of an entry, its types, and the docstring."""
    yield from signature(entry, reference)
    if entry.doc:
        yield markdown(entry.doc, lambda code: reference.link(code, name=entry.name))


def signature(entry: Entry, reference: Reference) -> Iterator[str]:
    """Yield the signature of an entry, and the line of its types."""
    if entry.signature:
        yield f"```text\n{entry.signature}\n```\n"
        yield from reference.types_line(entry)


def method_page(name: str) -> str:
    """Return the page of docs/reference/algorithms whose heading contains the name of a class."""
    for file in sorted((ROOT / METHODS).glob("[a-z]*.md")):
        if name in re.findall(r"[\w-]+", file.read_text("utf-8").partition("\n")[0].replace("-", "")):
            return file.name
    raise SystemExit(f"no page of {METHODS} has a heading that names {name}")


def entries_of(module: Module) -> list[Entry]:
    """Return the entries of a module: functions and constants first, then classes."""
    return sorted((entry_of(module, name) for name in names_of(module)), key=lambda one: one.name[0].isupper())


def entry_of(module: Module, name: str) -> Entry:
    """Return the entry of a public name of a module."""
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
    """Return the entry of a class."""
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
    """Return the entry of a type that no module exports: a class, or a name for a type."""
    if isinstance(found.node, ast.ClassDef):
        return entry_of_class(getattr(import_module(found.module), found.name))
    return Entry(found.name, ast.unparse(found.node), found.text, (found.module,))


def rooms_of(value: Any) -> tuple[str, ...]:
    """Return the modules of the library that define a function, or a class and its bases."""
    classes = value.__mro__ if inspect.isclass(value) else [inspect.unwrap(value)]
    return tuple(dict.fromkeys(one.__module__ for one in classes if one.__module__.startswith("fedbilevel.")))


def types_in(entry: Entry) -> Iterator[Definition]:
    """Yield the types of the library that occur in a signature, each once, in this order."""
    for name in dict.fromkeys(re.findall(r"\b[A-Z]\w+", entry.signature)):
        found = next(filter(None, (definition(room, name) for room in entry.rooms)), None)
        if found and found.name != entry.name:
            yield found


def fields_of_bases(cls: type, doc: str) -> str:
    """Return the docstring of the nearest base class with a section "Args:", from there on; "" if `doc` has one."""
    bases = [inspect.getdoc(base) or "" for base in cls.__mro__[1:] if base.__module__.startswith("fedbilevel.")]
    found = next((base for base in bases if "\nArgs:" in base), "")
    return f"\n\n{found[found.index('Args:') :]}" if found and "Args:" not in doc else ""


def members(cls: type) -> Iterator[Entry]:
    """Yield the entries of a class's members that MEMBERS lists: methods with their arguments, and properties."""
    for name in MEMBERS.get(cls.__name__, "").split():
        value = inspect.getattr_static(cls, name)
        function, doc = getattr(value, "__func__", value), inspect.getdoc(getattr(cls, name)) or ""
        if inspect.isfunction(function):
            call = arguments(function, bound=not isinstance(value, staticmethod))
            yield Entry(name, call, doc, rooms_of(function))
        else:
            yield Entry(name, "", doc)


def unloaded(module: str, name: str) -> Entry:
    """Return the entry of a function from the source of a module.

    The module is not imported, since its package may not be installed.
    """
    found = definition(module, name)
    if found is None or not isinstance(found.node, ast.FunctionDef):
        raise SystemExit(f"{module} does not define {name}")
    returns = f" -> {ast.unparse(found.node.returns)}" if found.node.returns else ""
    call = f"{name}({ast.unparse(found.node.args)}){returns}"
    return Entry(name, call, ast.get_docstring(found.node) or "", (module,))


def signature_of(name: str, value: Any) -> str:
    """Return the call of a class or function. If it is long, each argument has a line of its own."""
    inside, returns = arguments(value).removeprefix("("), ""
    inside, _, returns = inside.rpartition(")")
    whole = f"{name}({inside}){returns}"
    if inspect.isclass(value):
        whole, returns = f"{name}({inside})", ""
    if len(whole) <= 90:
        return whole
    return f"{name}(\n" + "".join(f"    {one},\n" for one in split(inside)) + f"){returns}"


def split(inside: str) -> list[str]:
    """Split the arguments of a call at the commas that are not inside brackets."""
    found, depth = [""], 0
    for character in inside:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [one.strip() for one in found]


def arguments(value: Any, bound: bool = False) -> str:
    """Return the arguments of a function or class and the result of a function, with types as in the source.

    Evaluated types would be printed differently by each version of Python and NumPy.
    """
    types = types_of(value)
    parameters = [
        one.replace(default=plain(one.default), annotation=types.get(name, one.empty))
        for name, one in inspect.signature(value).parameters.items()
    ][bound:]
    returns = types.get("return", inspect.Signature.empty)
    text = str(inspect.Signature(parameters, return_annotation=returns))
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z]\w+|ndarray)", "", text)


def source_of(value: Any) -> ast.stmt:
    """Return the statement that defines a class or function of the library."""
    node: Any = tree_of(value.__module__)
    for name in value.__qualname__.split("."):  # the last definition of a name is the one after those with @overload
        node = [one for one in node.body if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == name][-1]
    return node


def types_of(value: Any) -> dict[str, "Written"]:
    """Return the source text of each argument's type, by the argument's name; the result has the name "return"."""
    if not inspect.isclass(value):
        function = source_of(inspect.unwrap(value))
        assert isinstance(function, ast.FunctionDef)
        return types_of_function(function)
    found = {}
    for base in reversed([base for base in value.__mro__ if base.__module__.startswith("fedbilevel.")]):
        definition = source_of(base)
        assert isinstance(definition, ast.ClassDef)
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = Written(held(ast.unparse(node.annotation)))
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                found |= types_of_function(node)
    found.pop("return", None)
    return found


def held(annotation: str) -> str:
    """Return the type of a field's values, from an annotation that also says which values are accepted."""
    kind = vars(field_types).get(annotation)
    return annotation if kind is None else getattr(kind, "__name__", str(kind))


def types_of_function(function: ast.FunctionDef) -> dict[str, "Written"]:
    """Return the same as `types_of`, from the syntax tree of a function's definition."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    found = {one.arg: Written(ast.unparse(one.annotation)) for one in every if one.annotation}
    return found | ({"return": Written(ast.unparse(function.returns))} if function.returns else {})


class Written:
    """A default value, or a type, whose printed form is this text."""

    def __init__(self, text: str) -> None:
        self.text = text.strip("'\"")

    def __repr__(self) -> str:
        return self.text


def plain(default: Any) -> Any:
    """Return a default value; three dots in its place if its text is long or has an address in memory."""
    text = repr(default)
    dots = default is not inspect.Parameter.empty and ("<" in text or len(text) > 60)
    return Written("…") if dots else default


def markdown(doc: str, link: Callable[[str], str] = str) -> str:
    """Return a docstring as Markdown.

    Sections such as "Args:" become lists, and `link` is applied to each piece of code.
    """
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
    """Return an entry of a section as an item of a list, with the entry's name as code."""
    name, colon, rest = " ".join(text.split()).partition(": ")
    if not (colon and re.fullmatch(r"[\w, *.]+", name)):
        return f"- {prose(name + colon + rest, link)}"
    return f"- {link(f'`{name}`') if name[0].isupper() else f'`{name}`'}: {prose(rest, link)}"


def prose(text: str, link: Callable[[str], str]) -> str:
    """Return text in which Markdown reads no character as a mark, except the backquotes of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(link(part) if part.startswith("`") else re.sub(r"([*<\[])", r"\\\1", part) for part in parts)


def examples(name: str) -> dict[str, str]:
    """Return the cells of a file of examples, by the name in the line before each cell."""
    file = EXAMPLES / f"api_{name}.py"
    cells = re.split(r"^# %% (\w+)\n", file.read_text("utf-8"), flags=re.MULTILINE) if file.is_file() else [""]
    return {name: text.strip() for name, text in zip(cells[1::2], cells[2::2], strict=True)}
