"""A Sphinx extension with the directive `player`: `{player} paged` inserts a player for docs/_static/traces/paged.jsonl."""

import json
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvref_conformance.report.player_element import element

TRACES = Path("_static/traces")


class Player(SphinxDirective):
    required_arguments = 1
    option_spec = {"label": directives.unchanged, "opens": directives.flag}  # noqa: RUF012  # docutils' own form

    def run(self) -> list[nodes.Node]:
        path = TRACES / f"{self.arguments[0]}.jsonl"
        trace = (Path(self.env.srcdir) / path).read_text(encoding="utf-8")
        label = self.options.get("label") or json.loads(trace.partition("\n")[0])["check"]
        opens = "opens" in self.options
        source = "A trace to try it with" if opens else "This trace as a file"
        here = "../" * self.env.docname.count("/") + path.as_posix()
        html = f'{element(trace, label, opens)}\n<p class="kv-source"><a href="{here}" download>{source}</a></p>\n'
        return [nodes.raw("", html, format="html")]


def setup(app: Sphinx) -> None:
    app.add_directive("player", Player)
