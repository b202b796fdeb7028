"""Build the website from the pages of this working tree into build/site: `make docs`.

With `--versions` (`make docs-versions`), the website has a folder for each tag such as v0.2.0, and the folder
`development` for this working tree. Each version is built with its own settings, from a temporary clone. The file
versions.js beside the folders lists the versions and their pages. Every page reads this file to offer a choice of
versions, even if the files are opened without a server. The first page leads to the newest version.

With `--links` (`make links`), nothing is built. Instead, each link to another website is opened.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
SETTINGS = Path("docs", "website")
DEVELOPMENT = "development"
BUILD = (sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--fresh-env", "--jobs", "auto")
FIRST_PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<title>fedbilevel</title>
<meta http-equiv="refresh" content="0; url={version}/index.html">
<a href="{version}/index.html">fedbilevel {version}</a>
"""


def build(tree: Path, site: Path, version: str | None = None) -> None:
    """Build the pages of a working tree.

    With a `version`, the pages offer a choice of other versions, which are in folders beside theirs.
    """
    choice = ["-A", f"version_of_folder={version}"] if version else []
    sphinx(tree, site, *choice)


def sphinx(tree: Path, output: Path, *options: str) -> None:
    """Run Sphinx on the pages of a working tree, with the tree's settings.

    If Sphinx finds an error, exit with its status.
    """
    with tempfile.TemporaryDirectory() as scratch:
        status = subprocess.run([*BUILD, *options, "-c", tree / SETTINGS, "-d", scratch, tree, output], check=False)
    if status.returncode:
        sys.exit(status.returncode)


def build_versions(root: Path, site: Path) -> None:
    """Build the pages of every tag that has a website, the newest first, and the pages of the working tree."""
    with tempfile.TemporaryDirectory() as scratch:
        for tag in tags(root):
            tree = Path(scratch, tag)
            clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--shared", "--branch", tag]
            subprocess.run([*clone, root, tree], check=True)
            if not (tree / SETTINGS / "conf.py").is_file():
                print(f"{tag} is left out: it has no settings of a website")
                continue
            build(tree, site / tag.removeprefix("v"), tag.removeprefix("v"))
    build(root, site / DEVELOPMENT, DEVELOPMENT)
    write_choice(site, [*(tag.removeprefix("v") for tag in tags(root)), DEVELOPMENT])


def tags(root: Path) -> list[str]:
    """Return the tags of versions, the newest first."""
    command = ["git", "tag", "--list", "--sort=-version:refname", "v*"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()
    return [tag for tag in listed if re.fullmatch(r"v\d+(\.\d+)+", tag)]


def write_choice(site: Path, versions: list[str]) -> None:
    """Write the list of versions that were built, with their pages, and the page that leads to the first version."""
    pages = {
        version: sorted(str(page.relative_to(site / version)) for page in (site / version).rglob("*.html"))
        for version in versions
        if (site / version).is_dir()
    }
    (site / "versions.js").write_text(f"const versions = {json.dumps(pages)};\n", "utf-8")
    (site / "index.html").write_text(FIRST_PAGE.format(version=next(iter(pages))), "utf-8")


if __name__ == "__main__":
    if "--links" in sys.argv[1:]:
        sphinx(ROOT, ROOT / "build" / "links", "--builder", "linkcheck")
        sys.exit()
    shutil.rmtree(SITE, ignore_errors=True)
    if "--versions" in sys.argv[1:]:
        build_versions(ROOT, SITE)
    else:
        build(ROOT, SITE)
    print(f"{SITE.relative_to(ROOT)}/index.html is its first page")
