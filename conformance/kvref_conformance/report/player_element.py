"""The trace player: the scripts in `static/player` (without a framework), and the HTML element that contains a trace.

The trace is part of the page, because a page that is opened from a disk cannot fetch other files.
"""

from html import escape
from pathlib import Path

STATIC = Path(__file__).parent / "static"
SCRIPTS = [
    f"player/{name}.js"
    for name in ("trace", "families", "paged", "worlds", "pictures", "windowed", "recurrent", "rows", "player")
]  # in the order in which they depend on each other
STYLES = ["player/player.css"]


def element(trace: str, label: str | None = None, opens: bool = False) -> str:
    """The HTML element for a trace. label: its title (default: its clause and implementation). opens: with a file chooser."""
    named, opened = f' label="{escape(label)}"' if label else "", " opens" if opens else ""
    inside = trace.strip().replace("<", "\\u003c")  # escaped, so that the JSON cannot close the script element
    return (
        f'<kv-player{named}{opened}><script type="application/jsonl">\n{inside}\n</script>'
        "<noscript>The player needs JavaScript.</noscript></kv-player>"
    )
