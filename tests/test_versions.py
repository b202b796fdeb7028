"""All files that name the version of the library name the same one."""

import re
import tomllib
from pathlib import Path

import fedbilevel

ROOT = Path(__file__).resolve().parent.parent
RECIPE = (ROOT / "conda" / "recipe.yaml").read_text("utf-8")


def test_the_version_is_the_same_in_every_file():
    named = {"package": tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]}
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    named["citation"] = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)[0]
    locked = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
    named["lock"] = next(one["version"] for one in locked if one["name"] == "fedbilevel")
    named["conda"] = re.findall(r'^  version: "(\S+)"$', RECIPE, re.MULTILINE)[0]
    assert named == dict.fromkeys(named, fedbilevel.__version__)


def test_the_recipe_for_conda_has_the_dependencies_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = re.findall(r"^    - (\S+ >=\S+)$", RECIPE, re.MULTILINE)
    needed = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    assert [one.replace(" ", "") for one in listed] == needed
    (oldest,) = re.findall(r'^  python_min: "(\S+)"$', RECIPE, re.MULTILINE)
    assert project["project"]["requires-python"] == f">={oldest}"
    assert f"- fedbilevel = {project['project']['scripts']['fedbilevel']}\n" in RECIPE
