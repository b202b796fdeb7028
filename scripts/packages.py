"""Build wheel and sdist into dist/. Check their files, and try the wheel in an environment without extras.

`make packages` and the workflows run this script. The files of the packages are compared with the files that git
tracks, which finds files that are superfluous or missing. Twine checks what a package index would show. Two type
checkers check an example against the types in the wheel. The recipe for conda is rendered, but not built, since
building needs a channel of conda.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from bootstrap import ROOT, install_uv, interpreter, mirror, uv_environment

DIST = ROOT / "dist"
OF_BUILD = {"PKG-INFO", ".gitignore", "pyproject.toml"}  # files that the builder adds to an sdist
OF_METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
CHECKERS = ("mypy", "basedpyright")  # basedpyright is pyright as a Python package that includes all it needs
WITHOUT_EXTRAS = """
import sys
import fedbilevel as fb
from fedbilevel.tasks import quadratic

task = quadratic(clients=2)
assert fb.solve(fb.SimFBO(), task.problem, task.clients, task.x0, task.y0, rounds=2).round == 2
assert fb.__file__.startswith(sys.prefix), fb.__file__
assert not {"rich", "matplotlib", "flwr"} & set(sys.modules)
print(fb.__version__)
"""
RENDER = """
import sys
from rattler_build import Stage0Recipe

(one,) = Stage0Recipe.from_file(sys.argv[1]).render()
package = one.recipe.to_dict()["package"]
print(package["name"], package["version"])
"""
IMPORT = """
import time

before = time.process_time()
import fedbilevel
print(f"{time.process_time() - before:.3f}")
"""
EXAMPLE = """
import jax.numpy as jnp

import fedbilevel as fb


def outer(x: jnp.ndarray, y: jnp.ndarray, batch: dict[str, jnp.ndarray]) -> jnp.ndarray:
    return jnp.mean((batch["target"] - y) ** 2)


def inner(x: jnp.ndarray, y: jnp.ndarray, batch: dict[str, jnp.ndarray]) -> jnp.ndarray:
    return outer(x, y, batch) + jnp.exp(x) * y**2


data = {"target": jnp.arange(6.0)}
clients = fb.Clients.split([data, data], 0.5, seed=0)
method = fb.SimFBO(server_lr=fb.XYV(0.05, 0.1, 0.1), local_steps=2)
result: fb.Result = fb.solve(method, fb.Bilevel(outer, inner), clients, jnp.zeros(()), jnp.zeros(()), rounds=2)
rounds: int = result.round
losses: list[float] = [row["outer_loss"] for row in result.history.rows if "outer_loss" in row]
"""


def run(*command: str | Path, fails: bool = False, **given: object) -> str:
    """Run a command, and return what it prints.

    This program ends if the command fails or, with `fails`, if it does not fail.
    """
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **given)  # type: ignore[call-overload]
    said = str(done.stdout + done.stderr)
    if bool(done.returncode) is not fails:
        sys.exit(f"packages: `{' '.join(map(str, command))}` has ended with {done.returncode}:\n{said}")
    return said


def require(holds: bool, what: object) -> None:
    if not holds:
        sys.exit(f"packages: {what}")


def tracked() -> set[str]:
    return set(run("git", "ls-files", cwd=ROOT).splitlines())


def check_wheel(wheel: Path, version: str) -> None:
    """Check that the wheel has all of src/fedbilevel, the metadata and the licence, and nothing else."""
    found = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    sources = {name.removeprefix("src/") for name in tracked() if name.startswith("src/")}
    expected = sources | {f"fedbilevel-{version}.dist-info/{name}" for name in OF_METADATA}
    require("fedbilevel/py.typed" in found, "the wheel has no py.typed")
    require(found == expected, f"the wheel has or lacks: {sorted(found ^ expected)}")
    print(f"{wheel.name}: {len(found)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def check_sdist(sdist: Path, version: str) -> None:
    """Check that the sdist has only files that git tracks, and among them all sources, all tests and the licence."""
    with tarfile.open(sdist) as opened:
        found = {one.name.removeprefix(f"fedbilevel-{version}/") for one in opened.getmembers() if one.isfile()}
    there = tracked()
    needed = {name for name in there if name.startswith(("src/", "tests/"))} | {"LICENSE", "README.md", *OF_BUILD}
    require(found <= there | OF_BUILD, f"the sdist has stray files: {sorted(found - there - OF_BUILD)}")
    require(needed <= found, f"the sdist lacks: {sorted(needed - found)}")
    print(f"{sdist.name}: {len(found)} files, {sdist.stat().st_size / 1e6:.1f} MB")


def check_installed(uv: Path, env: dict[str, str], wheel: Path, version: str, place: Path) -> None:
    """Check that the library runs without extras, and that the command line says in a sentence what it needs."""
    python, given = place / "venv/bin/python", {"cwd": place, "env": env}
    run(uv, "venv", "--quiet", "--python", interpreter(), place / "venv", **given)
    run(uv, "pip", "install", "--quiet", "--python", python, wheel, **given)
    require(run(python, "-I", "-W", "ignore", "-c", WITHOUT_EXTRAS, **given).split()[-1] == version, "another version")
    print(f"import fedbilevel: {run(python, '-I', '-c', IMPORT, **given).strip()} s of processor time")
    said = run(place / "venv/bin/fedbilevel", "run", "quadratic", fails=True, **given)
    last = said.splitlines()[-1]
    require("needs rich" in last and "Traceback" not in said, f"no sentence says what is missing:\n{said}")
    print(f"without extras: runs; the command line says: {last}")
    (place / "example.py").write_text(EXAMPLE)
    types = {"mypy": ["--strict", f"--python-executable={python}"], "basedpyright": [f"--pythonpath={python}"]}
    (place / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    for name in CHECKERS:
        run(uv, "tool", "run", "--quiet", name, *types[name], "example.py", **given)
        print(f"{name}: no error in an example")


def check_recipe(uv: Path, env: dict[str, str], version: str) -> None:
    """Check that the recipe for conda can be rendered, which needs no channel."""
    program = ("tool", "run", "--quiet", "--from", "py-rattler-build", "python", "-c", RENDER)
    found = run(uv, *program, ROOT / "conda/recipe.yaml", env=env).split()
    require(found == ["fedbilevel", version], f"the recipe for conda is of {found}, not of fedbilevel {version}")
    print("conda/recipe.yaml: renders")


def main() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    uv, env = install_uv(), uv_environment()
    env |= {"UV_DEFAULT_INDEX": index} if (index := mirror()) else {}
    shutil.rmtree(DIST, ignore_errors=True)
    run(uv, "build", "--quiet", "--python", interpreter(), "--out-dir", DIST, cwd=ROOT, env=env)
    wheel, sdist = DIST / f"fedbilevel-{version}-py3-none-any.whl", DIST / f"fedbilevel-{version}.tar.gz"
    found = {path for path in DIST.iterdir() if path.suffix in (".whl", ".gz")}
    require(found == {wheel, sdist}, f"dist/ has {sorted(path.name for path in found)}")
    check_wheel(wheel, version)
    check_sdist(sdist, version)
    run(uv, "tool", "run", "--quiet", "twine", "check", "--strict", wheel, sdist, env=env)
    print("twine: no error in the metadata")
    check_recipe(uv, env, version)
    with tempfile.TemporaryDirectory() as place:
        check_installed(uv, env, wheel, version, Path(place))


if __name__ == "__main__":
    main()
