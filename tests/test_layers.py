"""A file imports only what docs/architecture.md allows to its room, and is not long; `import fedbilevel` is light.

A room is a top-level package or module. No files import each other in a circle.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fedbilevel.core.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "fedbilevel"
PUBLIC_MODULES = (
    r"fedbilevel\.(authoring|errors|extending|parts|tasks(\.\w+)?|data(\.columns)?|torch|flower(\.privacy|\.versions)?|engines|"
    r"estimators|experiments|"
    r"trackers)"
)
FILES = sorted(PACKAGE.rglob("*.py"))

BELOW_EXPERIMENTS = {"display", "sweeps", "diagnostics", "engines", "flower", "algorithms", "oracles", "tasks", "data"}
BELOW_EXPERIMENTS |= {"estimators"}
ROOMS = {  # room: the other rooms that it may import; "root" is fedbilevel/__init__.py and public.py
    "wording": set(),
    "reading": {"wording"},
    "machinery": set(),
    "core": {"machinery", "reading", "wording"},
    "data": {"reading", "wording"},
    "oracles": {"core"},
    "algorithms": {"machinery", "oracles", "core"},
    "display": {"core", "wording"},
    "engines": {"root", "machinery", "core", "oracles", "algorithms", "display", "reading", "wording"},
    "diagnostics": {"core", "oracles", "engines", "algorithms", "flower", "tasks", "wording"},
    "flower": {"root", "core", "engines", "algorithms", "reading", "wording"},
    "sweeps": {"core", "display", "engines", "wording"},
    "tasks": {"machinery", "core", "data"},
    "estimators": {"root", "data"},
    "torch": {"root"},
    "trackers": {"core", "engines", "wording"},
    "experiments": {"root", "reading", "wording", "core", "trackers", *BELOW_EXPERIMENTS},
    "cli": {"root", "wording", "core", "trackers", "experiments", *BELOW_EXPERIMENTS},
    "root": {
        "core",
        "oracles",
        "algorithms",
        "engines",
        "diagnostics",
        "sweeps",
        "tasks",
        "data",
        "reading",
        "trackers",
        "wording",
    },
}
ON_PUBLIC_NAMES = ("estimators", "flower/launch", "torch")  # they could be other packages: docs/reference/extending.md
FLOWER = {  # room of fedbilevel.flower: the others that it may import; "root" has the files directly in this folder
    "root": set(),
    "refusal": set(),
    "wire": {"refusal"},
    "privacy": set(),
    "server": {"root", "refusal", "wire"},
    "client": {"refusal", "wire", "privacy"},
    "launch": {"root"},
}
ARRAYS = {"jax", "optax", "numpy"}
# Third-party packages: a room in ONLY may import only these, and a room in NEVER may import all except these.
ONLY = {"machinery": ARRAYS, "core": ARRAYS | {"dp_accounting"}, "oracles": ARRAYS, "algorithms": ARRAYS}
OF_ONE_ROOM = {"flwr": "flower", "torch": "torch", **dict.fromkeys(("mlflow", "tensorboardX", "wandb"), "trackers")}
NEVER = {room: {package for package, only in OF_ONE_ROOM.items() if only != room} for room in ROOMS}
NEVER["data"] |= {"jax", "optax"}
HEAVY = {"flwr", "torch", "matplotlib", "sklearn", "rich", "pandas", "mlflow", "tensorboardX", "wandb"}


def room_of(path: Path) -> str:
    """Return the room of a file, whose path is relative to the package."""
    name = path.with_suffix("").parts[0]
    root = ("__init__", "public", "errors", "authoring", "parts", "extending")
    return "root" if name in root else name.replace("__main__", "cli")


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    """Yield the absolute dotted name and the line of each import in a file; `from a import b` gives "a.b"."""
    package = ("fedbilevel", *path.parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names)


def without_functions(tree: ast.Module) -> ast.Module:
    """Return the statements that run when the module is imported.

    The room "root" may import another room in a function, or for type checkers.
    """
    checked = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    kept = [node for node in tree.body if not isinstance(node, ast.FunctionDef) and node not in checked]
    return ast.Module(body=kept, type_ignores=[])


def forbidden(source: str, path: Path) -> list[str]:
    """Return a line of text for each forbidden import of a file, which is at `path` inside the package."""
    room = room_of(path)
    if room not in ROOMS:
        return [f"{path}: a new room; say in tests/test_layers.py what it may import"]
    tree = ast.parse(source)
    if room == "root":
        tree = without_functions(tree)
    found = []
    for name, line in imported(tree, path):
        top, *rest = name.split(".")
        if top == "fedbilevel":
            target = rest[0] if rest and rest[0] in ROOMS else "root"
            wrong = target not in ROOMS[room] | {room}
        else:
            known = top in sys.stdlib_module_names or top in ONLY.get(room, {top})
            wrong = not known or top in NEVER.get(room, ())
        if wrong:
            found.append(f"{path}:{line}: {room} may not import {name}")
    return found


def forbidden_in_flower(source: str, path: Path) -> list[str]:
    """Return a line of text for each import that a file of fedbilevel.flower may not make from another room of it.

    Its `__init__` may import all rooms, for type checkers.
    """
    room = path.parts[1].removesuffix(".py")
    room = room if room in FLOWER or len(path.parts) > 2 else "root"
    if path == Path("flower/__init__.py"):
        return []
    if room not in FLOWER:
        return [f"{path}: a new room; say in tests/test_layers.py what it may import"]
    found = []
    for name, line in imported(ast.parse(source), path):
        if name.startswith("fedbilevel.flower."):
            target = name.split(".")[2]
            if (target if target in FLOWER else "root") not in FLOWER[room] | {room}:
                found.append(f"{path}:{line}: flower/{room} may not import {name}")
    return found


def private(source: str, path: Path) -> list[str]:
    """Return a line of text for each name that a file of ON_PUBLIC_NAMES imports and that no public module lists."""
    folder = next(one for one in ON_PUBLIC_NAMES if str(path).startswith(f"{one}/"))
    found = []
    for name, line in imported(ast.parse(source), path):
        module, _, attribute = name.rpartition(".")
        own = name.startswith(f"fedbilevel.{folder.replace('/', '.')}.")
        listed = module == "fedbilevel" or re.fullmatch(PUBLIC_MODULES, module)
        if name.startswith("fedbilevel.") and not own and not (listed and attribute in import_module(module).__all__):
            found.append(f"{path}:{line}: {folder} needs {name}, which is not public")
    return found


def test_what_could_be_a_package_of_its_own_needs_public_names_alone() -> None:
    """Rooms that could be packages of their own import only public names of the library."""
    files = [file for file in FILES if str(file.relative_to(PACKAGE)).startswith(ON_PUBLIC_NAMES)]
    assert len(files) > 15
    assert [line for file in files for line in private(file.read_text(), file.relative_to(PACKAGE))] == []


@pytest.mark.parametrize(
    "source",
    [
        "from fedbilevel.core.errors import require",
        "def f():\n    from fedbilevel.wording import missing",
        "from fedbilevel.errors import require",
        "from fedbilevel import core",
        "import fedbilevel.core.errors",
        "from ..core import errors",
        "from fedbilevel.flower import wire",
        "from fedbilevel.flower.versions import BACKOFF",
        "from fedbilevel.estimators import columns",
    ],
)
def test_the_check_finds_a_name_that_is_not_public(source: str) -> None:
    assert len(private(source, Path("torch/bridge.py"))) == 1


def test_rooms_of_flower_import_each_other_as_the_table_says() -> None:
    files = [file for file in FILES if PACKAGE / "flower" in file.parents]
    assert [line for file in files for line in forbidden_in_flower(file.read_text(), file.relative_to(PACKAGE))] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("flower/wire.py", "from fedbilevel.flower.server import engine"),
        ("flower/server/engine.py", "def f():\n    from fedbilevel.flower.launch import private"),
        ("flower/attic/old.py", ""),
    ],
)
def test_the_check_finds_a_forbidden_import_in_flower(path: str, source: str) -> None:
    assert len(forbidden_in_flower(source, Path(path))) == 1


def test_a_name_of_another_public_module_or_a_near_one_is_found() -> None:
    import fedbilevel

    with pytest.raises(AttributeError, match=r"no attribute 'SVRG', but fedbilevel\.parts has it$"):
        _ = fedbilevel.SVRG
    with pytest.raises(AttributeError, match=r"but fedbilevel\.authoring has it; or did you mean 'Clients'\?$"):
        _ = fedbilevel.Client
    with pytest.raises(AttributeError, match=r"no attribute 'SimFbo'; did you mean 'SimFBO'\?"):
        _ = fedbilevel.SimFbo
    with pytest.raises(AttributeError, match=r"no attribute 'Qqqq'$"):
        _ = fedbilevel.Qqqq


def test_docs_and_examples_import_nothing_private() -> None:
    """Code in docs and examples imports from public modules only, which are those of PUBLIC_MODULES."""
    found = {}
    for file in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("examples/**/*.py")]:
        imports = re.findall(r"^\s*from (fedbilevel\.[\w.]+) import", file.read_text("utf-8"), re.MULTILINE)
        found |= {name: file for name in imports if not re.fullmatch(PUBLIC_MODULES, name)}
    assert found == {}


@pytest.mark.slow
def test_type_checkers_see_the_fields_of_every_method(tmp_path: Path) -> None:
    """Type checkers know the fields of every method, so that they refuse an unknown one.

    If they did not know the type of a method, it would be `Any`, and every call would be accepted.
    """
    from mypy import api

    from fedbilevel import algorithms

    program = tmp_path / "program.py"
    program.write_text("\n".join(["import fedbilevel as fb", *(f"fb.{name}(wrong=1)" for name in algorithms.__all__)]))
    shown, _, _ = api.run(["--strict", str(program)])
    found = re.findall(r'"wrong" for "(\w+)"', shown)
    assert sorted(set(found)) == sorted(algorithms.__all__)


@pytest.mark.slow
def test_type_checkers_accept_what_fields_accept_and_refuse_the_rest() -> None:
    from mypy import api

    program = Path(__file__).with_name("typed_program.py")
    shown, errors, _ = api.run(["--strict", str(program)])
    assert errors == ""
    refused = {int(line) for line in re.findall(rf"{program.name}:(\d+): error", shown)}
    lines = enumerate(program.read_text("utf-8").splitlines(), 1)
    assert refused == {number for number, line in lines if line.endswith("# refused")}


def test_fields_accept_at_run_time_what_type_checkers_accept() -> None:
    right, _, wrong = Path(__file__).with_name("typed_program.py").read_text("utf-8").partition("WRONG = [\n")
    names: dict[str, Any] = {"__name__": "typed_program"}
    exec(compile(right, "typed_program.py", "exec"), names)
    assert names["step_of_x"](names["CHANGED"]).y == 0.2
    for line in wrong.splitlines()[:-1]:
        with pytest.raises(ConfigurationError):
            eval(line.partition(",  # refused")[0].strip(), names)


def test_public_names_are_what_a_user_is_shown() -> None:
    """`dir(fedbilevel)` has the public names and no others."""
    import fedbilevel

    shown = {name for name in dir(fedbilevel) if not name.startswith("__")}
    assert shown == set(fedbilevel.__all__)


def test_files_import_only_what_their_rooms_may() -> None:
    assert [line for file in FILES for line in forbidden(file.read_text(), file.relative_to(PACKAGE))] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("algorithms/simfbo.py", "from fedbilevel.engines.local.engine import Local"),
        ("algorithms/simfbo.py", "from fedbilevel import engines"),
        ("algorithms/simfbo.py", "from ..engines import local"),
        ("algorithms/simfbo.py", "def f():\n    from fedbilevel.data import load"),
        ("core/tree.py", "from fedbilevel.oracles import products"),
        ("core/tree.py", "import scipy.linalg"),
        ("data/clients.py", "import jax.numpy as jnp"),
        ("data/clients.py", "from fedbilevel.core.errors import require"),
        ("experiments/run.py", "from fedbilevel.cli import main"),
        ("tasks/images.py", "import torch"),
        ("__init__.py", "from fedbilevel.experiments import run"),
        ("attic/old.py", ""),
    ],
)
def test_the_check_finds_a_forbidden_import(path: str, source: str) -> None:
    assert len(forbidden(source, Path(path))) == 1


def test_hooks_of_algorithms_are_methods_not_looked_for() -> None:
    """Every hook is a method of `class Algorithm` with a default, so that no code looks for it by `hasattr`."""
    found = {file.name: re.findall(r"(?:has|get)attr\((?:\w+\.)*algorithm\b.*", file.read_text()) for file in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_what_the_loop_of_a_run_calls_does_not_know_each_other() -> None:
    """The modules of the objects that the loop of a run calls import neither each other nor the loop."""
    parts = {f"fedbilevel.engines.{name}" for name in ("execution", "measurements", "rescue", "saver")}
    trees = {part: ast.parse((PACKAGE / "engines" / f"{part.rpartition('.')[2]}.py").read_text()) for part in parts}
    found = {
        part: {name.rpartition(".")[0] for name, _ in imported(tree, Path("engines"))} for part, tree in trees.items()
    }
    assert [part for part in found if found[part] & {*parts, "fedbilevel.engines.loop"}] == []


def test_import_fedbilevel_loads_nothing_heavy() -> None:
    program = "import sys, fedbilevel; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = set(shown.stdout.split())
    assert "fedbilevel" in loaded
    assert loaded & HEAVY == set()


def test_the_names_for_other_packages_load_no_jax() -> None:
    program = "import sys, fedbilevel.extending; print('jax' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert shown.stdout == "False\n"


def test_one_file_knows_pytorch() -> None:
    """Of the files of fedbilevel.torch, only bridge.py imports PyTorch."""
    of_torch = [file for file in FILES if PACKAGE / "torch" in file.parents]
    names = {file.name: [name for name, _ in imported(ast.parse(file.read_text()), Path("torch"))] for file in of_torch}
    assert [file for file in names if any(name.split(".")[0] == "torch" for name in names[file])] == ["bridge.py"]


def test_a_file_can_be_read_from_top_to_bottom() -> None:
    """No file of the library has more than 600 lines."""
    lengths = {str(file.relative_to(PACKAGE)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > 600} == {}


def module_of(path: Path) -> str:
    return ".".join(("fedbilevel", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def test_no_files_import_each_other_in_a_circle() -> None:
    """No files import each other in a circle, also not inside functions or under TYPE_CHECKING."""
    modules = {module_of(file): file for file in FILES}
    imports: dict[str, set[str]] = {}
    for module, file in modules.items():
        names = [name for name, _ in imported(ast.parse(file.read_text()), file.relative_to(PACKAGE))]
        imports[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
        imports[module] -= {module}
    imports["fedbilevel"] = set()  # it exports names of the rooms, and a room may import it
    TopologicalSorter(imports).prepare()  # CycleError names the modules of a circle
