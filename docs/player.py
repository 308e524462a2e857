"""The directive that puts a player into a page, with its trace: `{player} paged` plays docs/_static/traces/paged.jsonl."""

import json
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

TRACES = Path("_static/traces")
SCRIPTS = [
    f"player/{name}.js" for name in ("trace", "families", "paged", "worlds", "pictures", "windowed", "player")
]  # each stands on those before it
STYLES = ["player/player.css"]


class Player(SphinxDirective):
    """The page holds the trace itself: a page opened from a disk cannot fetch a file beside it."""

    required_arguments = 1
    option_spec = {"label": directives.unchanged, "opens": directives.flag}  # noqa: RUF012  # docutils' own form

    def run(self) -> list[nodes.Node]:
        path = TRACES / f"{self.arguments[0]}.jsonl"
        lines = (Path(self.env.srcdir) / path).read_text(encoding="utf-8").strip()
        label = escape(self.options.get("label") or json.loads(lines.partition("\n")[0])["check"])
        opens = " opens" if "opens" in self.options else ""
        source = "A trace to try it with" if opens else "This trace as a file"
        here = "../" * self.env.docname.count("/") + path.as_posix()
        inside = lines.replace("<", "\\u003c")  # JSON that cannot end the element
        html = (
            f'<kv-player label="{label}"{opens}><script type="application/jsonl">\n{inside}\n</script>'
            f"<noscript>The player needs JavaScript.</noscript></kv-player>\n"
            f'<p class="kv-source"><a href="{here}" download>{source}</a></p>\n'
        )
        return [nodes.raw("", html, format="html")]
