"""A Sphinx extension that rewrites sources for the site: links in Markdown pages, and markup in docstrings."""

import re

from sphinx.application import Sphinx

from kvref_conformance.clauses import all_clauses


def rewrite_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Convert links that work in the repository: chapters are pages of the site, and files outside it are only named."""
    text = re.sub(
        r"\]\((?:\.\./)*kvref/spec/\w+\.md#([a-z0-9-]+-\d\d)--[^)]*\)", lambda link: f"](#{link[1].upper()})", source[0]
    )
    text = _link_clauses(text)
    text = re.sub(r"\]\((?:\.\./)+kvref/spec/README\.md", rf"]({'../' * docname.count('/')}spec/index.md", text)
    text = re.sub(r"\]\((?:\.\./)+kvref/spec/(\w+)\.md", rf"]({'../' * docname.count('/')}spec/\1.md", text)
    pages = r"\]\((?:\.\./)+conformance/adapters/kvref_adapters/(\w+)/findings\.md"
    text = re.sub(pages, rf"]({'../' * docname.count('/')}findings/\1.md", text)
    if docname.startswith("spec/"):
        text = text.replace("](README.md)", "](index.md)")
    if docname.startswith("how/"):
        source[0] = link_issues(text)
        return
    text = re.sub(r"\[([^\]]+)\]\(\.\./(?!\.)([^)]+)\)", _name_file, text)
    source[0] = re.sub(r"\[([^\]]+)\]\((\w+\.schema\.json)\)", r"`kvref/spec/\2`", text)


def link_issues(text: str) -> str:
    """Turn OWNER/REPOSITORY#NUMBER into a link to the issue on GitHub."""
    return re.sub(r"\b([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", text)


def _link_clauses(text: str) -> str:
    """Turn clause ids in prose into links; ids in headings, code and links stay as they are."""
    ids = "|".join(map(re.escape, all_clauses()))
    fenced = re.split(r"(^ *```.*?^ *```$|^#.*?$|^\(.*?\)=$|`[^`]+`|\[[^\]]*\]\([^)]*\))", text, flags=re.DOTALL | re.MULTILINE)
    fenced[::2] = [re.sub(rf"(?<![\w-])({ids})(?![\w-])", r"[\1](#\1)", prose) for prose in fenced[::2]]
    return "".join(fenced)


def _name_file(link: re.Match[str]) -> str:
    label, path = link.groups()
    return f"`{path}`" if label == path else f"{label} (`{path}`)"


def rewrite_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Convert a docstring: backticks mark code, and all other characters that reStructuredText would interpret are escaped."""
    for number, line in enumerate(lines):
        pieces = re.split(r"(`[^`]+`)", line)
        lines[number] = "".join(
            f"`{piece}`" if piece.startswith("`") and len(piece) > 1 else re.sub(r"([*|_\\`])", r"\\\1", piece)
            for piece in pieces
        )


def setup(app: Sphinx) -> None:
    app.connect("source-read", rewrite_links)
    app.connect("autodoc-process-docstring", rewrite_docstring)
