"""Read the navigation of the website from pages that list others: docs/README.md, and the README.md of a folder.

docs/README.md has the sections, and the pages of each section in their order. If one of these pages is a README.md, the
pages of its folder to which it links come below it. So there is no second list of pages to maintain.
"""

import re
from pathlib import Path

HOME = "README.md"
LIST = "docs/README.md"
LINK = re.compile(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)")


def sections(root: Path) -> dict[str, list[str]]:
    """Return the sections of the navigation, and the pages of each, as paths from the top of the repository."""
    parts = re.split(r"^## (.*)\n", (root / LIST).read_text("utf-8"), flags=re.MULTILINE)
    return {title: linked(root, LIST, text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def below(root: Path, page: str) -> list[str]:
    """Return the pages below a README.md of the navigation: pages of its folder that docs/README.md does not list."""
    folder, name = page.rpartition("/")[::2]
    if name != "README.md" or page in (HOME, LIST):
        return []
    listed = {one for pages in sections(root).values() for one in pages}
    pages = linked(root, page, (root / page).read_text("utf-8"))
    return [one for one in pages if one.startswith(f"{folder}/") and one not in listed]


def every_page(root: Path) -> list[str]:
    """Return all pages of the navigation, in its order."""
    listed = [page for pages in sections(root).values() for page in pages]
    return [HOME, LIST, *(one for page in listed for one in [page, *below(root, page)])]


def linked(root: Path, page: str, text: str) -> list[str]:
    """Return the pages to which a text on a page links, each once, in their order."""
    files = [(root / page).parent / link for link in LINK.findall(text) if "://" not in link]
    return list(dict.fromkeys(str(file.resolve().relative_to(root.resolve())) for file in files))
