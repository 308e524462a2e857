"""The one diagram: the parts of kvref, what each is for, and which way imports point. Written to _static/architecture.svg."""

from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
# From the top down: what stands higher may import what stands lower.
PARTS = {
    ("the judge", "conformance/kvref_conformance"): {
        "families": "a folder each: all of its judging", "checking": "what checks are written with",
        "searching": "any sequence of calls", "oracle": "numbers, in fractions and float64",
        "conversation": "said, kept, shrunk, derived", "limits.py": "what an implementation takes",
        "judging": "how a verdict comes about", "implementations": "found by name, or programs",
        "vectors": "conversations as files", "report": "text, JSON, pages", "commands": "the kvref command",
        "soak": "a serving workload, for long", "canary": "a canary as files that engines load",
        "engines": "whose token a wrong one is",
    },
    ("backends at speed", "backends"): {
        "kvref_numpy.py": "in pieces that stay in cache", "kvref_torch.py": "on any of its devices",
        "kvref_cupy.py": "CUDA kernels",
    },
    ("the specification", "kvref"): {
        "spec": "the clauses, in Markdown", "contiguous.py": "one growing buffer", "paged.py": "blocks of one pool",
        "prefix.py": "blocks found by their tokens",
        "quantized.py": "a scale a row", "tiered.py": "recent tokens exact, old ones small",
        "pooled.py": "blocks from a buffer pool", "sharded.py": "heads and tokens over ranks",
        "blocks.py": "the pool and the tables", "buffers.py": "memory in five sizes", "attention.py": "softmax(scale q k') v",
        "canary": "a model that tells on its cache", "engine.py": "an engine in little",
        "rotary.py": "keys turned to their place", "formats": "how a row is stored",
        "backend.py": "the kernels, for reading",
    },
}  # fmt: skip
SAID = "The judge imports the backends and the specification, the backends the specification, and the specification neither."
WIDTH, COLUMNS, BOX, GAP = 960, 4, 44, 8  # pixels, and boxes a row
ARROW = 34  # pixels between two parts


def diagram() -> str:
    """An SVG with a background of its own, so that it can be read on a dark page too."""
    drawn, y = list[str](), 12
    for (title, folder), modules in PARTS.items():
        height = 34 + -(-len(modules) // COLUMNS) * (BOX + GAP)
        drawn.append(f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{height}" rx="6" fill="#eef2f7" stroke="#6b7a90"/>')
        drawn.append(f'<text x="20" y="{y + 21}" font-weight="bold">{title}: {folder}</text>')
        for number, (name, about) in enumerate(modules.items()):
            assert (ROOT / folder / name).exists(), name  # the diagram shows what there is
            drawn += _module(name, about, number, y + 32)
        y += height + ARROW
        if title != "the specification":
            arrow = f"M {WIDTH / 2} {y - 32} v 22 m -6 -8 l 6 8 l 6 -8"
            drawn.append(f'<path d="{arrow}" fill="none" stroke="#33415c" stroke-width="2"/>')
            drawn.append(f'<text x="{WIDTH / 2 + 14}" y="{y - 16}" font-size="12">imports</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - ARROW + 12}" role="img" font-family="sans-serif" '
        f'font-size="14" fill="#14213d"><title>{SAID}</title><rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _module(name: str, about: str, number: int, top: int) -> list[str]:
    width = (WIDTH - 40 - (COLUMNS - 1) * GAP) / COLUMNS
    x, y = 20 + number % COLUMNS * (width + GAP), top + number // COLUMNS * (BOX + GAP)
    return [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}" rx="4" fill="#ffffff" stroke="#9aa7ba"/>',
        f'<text x="{x + 8:.1f}" y="{y + 18}" font-family="monospace" font-size="13">{name}</text>',
        f'<text x="{x + 8:.1f}" y="{y + 35}" font-size="12">{escape(about)}</text>',
    ]
