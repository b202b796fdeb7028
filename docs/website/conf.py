"""Build the pages of the repository into a website: `make docs`.

Sphinx reads the pages where they are. If a link leads to a file of the repository that is not a page, it becomes a
download; if it leads to a folder, it becomes text. Names of the API in code become links to the reference. In a
signature, types become links: the links of the line "Types:" under the signature, which is removed.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from names import PAGES, Entry, entries, entry_of  # noqa: E402
from navigation import HOME, LIST, below, every_page, sections  # noqa: E402


def documented_version() -> str:
    """Return the version that these pages describe, from src/fedbilevel/__init__.py."""
    text = (ROOT / "src/fedbilevel/__init__.py").read_text("utf-8")
    return re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]


def revision() -> str:
    """Return the commit that these pages describe; "" outside of a clone."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


INDEX = ROOT / PAGES / "README.md"
project = "fedbilevel"
release = documented_version()
root_doc = HOME.removesuffix(".md")
include_patterns = every_page(ROOT)
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests"]
extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 6  # a link to a heading names it as on a code host
smartquotes = False
highlight_language = "none"
pygments_dark_style = "a11y-dark"
html_theme = "furo"
html_title = f"fedbilevel {release}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
templates_path = ["templates"]
html_context = {"revision": revision()}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_copy_source = False
html_show_copyright = False
UNLINKED = (nodes.title, nodes.strong, nodes.reference, addnodes.pending_xref, addnodes.download_reference)


class Website(StandaloneHTMLBuilder):
    """Write HTML in which README.md becomes the page of its folder, index.html."""

    name = "html"

    def get_output_path(self, page_name: str, /) -> Path:
        return super().get_output_path(address(page_name))

    def get_target_uri(self, docname: str, typ: str | None = None) -> str:
        return super().get_target_uri(address(docname), typ)

    def index_page(self, pagename: str, doctree: nodes.document, title: str) -> None:
        super().index_page(address(pagename), doctree, title)


def address(page: str) -> str:
    """Return the address of a page on the website, without .html."""
    return re.sub(r"(^|/)README$", r"\1index", page)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add hidden tables of contents to an index page, from which Sphinx makes the navigation."""
    file = f"{page}.md"
    tables = {"": [LIST], **sections(ROOT)} if file == HOME else {"": below(ROOT, file)}
    for caption, pages in tables.items():
        if pages:
            lines = [":hidden:", *([f":caption: {caption}"] if caption else []), "", *(f"/{one}" for one in pages)]
            source[0] += "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def link_names(app: Sphinx, doctree: nodes.document) -> None:
    """Turn names of the API in code into links, except in titles, in other links and in the section of the name."""
    names, page = entries(INDEX.read_text("utf-8")), app.env.current_document.docname
    for code in list(doctree.findall(nodes.literal)):
        entry = entry_of(code.astext(), names)
        if entry and not any(isinstance(one, UNLINKED) or is_of(one, entry, page) for one in ancestors(code)):
            target = {"reftarget": entry.page, "reftargetid": entry.anchor, "refdoc": page}
            link = addnodes.pending_xref("", refdomain="doc", reftype="myst", refexplicit=True, **target)
            code.replace_self(link)
            link += nodes.inline("", "", code)


def link_signatures(app: Sphinx, doctree: nodes.document) -> None:
    """Turn the types in a signature into links, those of the line "Types:" under it, and remove this line."""
    for line in [one for one in doctree.findall(nodes.paragraph) if one.astext().startswith("Types: ")]:
        links = {link.astext(): link for link in line.findall(addnodes.pending_xref)}
        above = line.parent[line.parent.index(line) - 1]
        code = next(one for one in above.findall() if isinstance(one, nodes.literal | nodes.literal_block))
        parts = re.split(rf"\b({'|'.join(links)})\b", code.astext())
        code.clear()
        code.rawsource = ""  # then Sphinx keeps the links, and does not highlight the text
        for part in parts:
            code += linked(links[part]) if part in links else nodes.Text(part)
        line.parent.remove(line)


def linked(link: addnodes.pending_xref) -> addnodes.pending_xref:
    """Return a copy of a link whose text is plain, since the signature around it is code already."""
    copy = link.copy()
    copy += nodes.inline("", link.astext())
    return copy


def ancestors(node: nodes.Element) -> Iterator[nodes.Element]:
    """Yield the elements that contain an element, from the inside out."""
    while node := node.parent:
        yield node


def is_of(node: nodes.Element, entry: Entry, page: str) -> bool:
    """Return whether an element is the section of an entry of the API reference."""
    return isinstance(node, nodes.section) and page == entry.page and nodes.make_id(entry.anchor) in node["ids"]


def unlink_folders(app: Sphinx, doctree: nodes.document) -> None:
    """Turn links to folders into text, since the website has no page for a folder without README.md."""
    folder = (ROOT / app.env.current_document.docname).parent
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and (folder / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.add_builder(Website, override=True)
    app.connect("source-read", add_contents)
    app.connect("doctree-read", unlink_folders)
    app.connect("doctree-read", link_signatures)
    app.connect("doctree-read", link_names)
