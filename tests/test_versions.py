"""Do all files that name the version of the library name the same one?"""

import re
import tomllib
from pathlib import Path

import fedbilevel

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_is_the_same_in_every_file():
    named = {"package": tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]}
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    named["citation"] = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)[0]
    locked = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
    named["lock"] = next(one["version"] for one in locked if one["name"] == "fedbilevel")
    assert named == dict.fromkeys(named, fedbilevel.__version__)
