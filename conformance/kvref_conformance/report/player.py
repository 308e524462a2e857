"""The player of traces, `static/player`: scripts without a framework that a page loads, and the element that holds a trace.

The page holds the trace itself: a page opened from a disk cannot fetch a file beside it.
"""

from html import escape
from pathlib import Path

STATIC = Path(__file__).parent / "static"
SCRIPTS = [
    f"player/{name}.js" for name in ("trace", "families", "paged", "worlds", "pictures", "windowed", "player")
]  # each stands on those before it
STYLES = ["player/player.css"]


def element(trace: str, label: str | None = None, opens: bool = False) -> str:
    """HTML that plays a trace. label: its name, in place of its clause and implementation. opens: others can be opened."""
    named, opened = f' label="{escape(label)}"' if label else "", " opens" if opens else ""
    inside = trace.strip().replace("<", "\\u003c")  # JSON that cannot end the element
    return (
        f'<kv-player{named}{opened}><script type="application/jsonl">\n{inside}\n</script>'
        "<noscript>The player needs JavaScript.</noscript></kv-player>"
    )
