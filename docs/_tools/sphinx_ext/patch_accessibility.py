"""A Sphinx extension that adds what the theme lacks for keyboards and screen readers, by editing the written pages."""

from pathlib import Path

from sphinx.application import Sphinx

REPLACEMENTS = {
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer">': '<aside class="toc-drawer" aria-label="On this page">',
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    "<pre>": '<pre tabindex="0">',  # focusable, because it scrolls; wide tables likewise
    '<div class="table-wrapper colwidths-auto docutils container">': (
        '<div class="table-wrapper colwidths-auto docutils container" tabindex="0">'
    ),
    '<div id="search-results">': '<h1>Search</h1><div id="search-results">',
}


def patch_pages(app: Sphinx, error: Exception | None) -> None:
    for name in () if error else app.env.found_docs | {"search"}:
        path = Path(app.outdir) / f"{name}.html"
        text = path.read_text(encoding="utf-8")
        for html, replacement in REPLACEMENTS.items():
            text = text.replace(html, replacement)
        path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", patch_pages)
