"""The architecture diagram, _static/architecture.svg: the parts of kvref, their contents, and the direction of imports."""

from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
# From top to bottom: a part may import the parts below it.
PARTS = {
    ("the judge", "conformance/kvref_conformance"): {
        "families": "checks and a model per family", "testlib": "sessions, laws, assertions",
        "fuzz": "random sequences of calls", "oracle": "exact results: fractions, float64",
        "calls": "calls and their records", "traces": "call traces, shrinking", "limits.py": "sizes an implementation supports",
        "runner": "check runner and verdicts", "implementations": "lookup by name, own adapters",
        "vectors": "test vectors: recorded call traces", "report": "text, JSON and HTML reports",
        "commands": "subcommands of kvref",
        "soak": "long-running serving workload",
    },
    ("whole engines", "conformance/kvref_canary"): {
        "files": "canary models as engines' files", "diagnosis": "causes of wrong tokens", "server": "client of HTTP servers",
    },
    ("fast backends", "backends"): {
        "kvref_numpy": "cache-sized tiles in NumPy", "kvref_torch": "any device of PyTorch",
        "kvref_cupy": "CUDA kernels",
    },
    ("the specification", "kvref"): {
        "spec": "clauses, in Markdown", "contiguous.py": "one growing buffer", "paged.py": "block tables over one pool",
        "prefix.py": "blocks cached by their tokens",
        "quantized.py": "one scale per row", "tiered.py": "recent tokens exact, old quantized",
        "pooled.py": "blocks from a buffer pool", "sharded.py": "heads and tokens split over ranks",
        "transfer.py": "sequences sent to other caches",
        "recurrent.py": "states of layers without attention", "pruned.py": "tokens evicted by scores",
        "sparse.py": "attention to tokens that an index chooses",
        "ragged.py": "rows of different lengths",
        "cross.py": "sources of cross-attention",
        "compressed.py": "one row for many tokens",
        "tree.py": "drafts with parents",
        "block_pool.py": "free blocks and references", "block_tables.py": "blocks per sequence and layer",
        "buffers.py": "buffer pool with five sizes",
        "attention.py": "softmax(scale q k') v",
        "canary": "models that reveal wrong KV reads", "engine.py": "minimal inference engine",
        "rope.py": "rotary embedding of keys", "formats": "storage formats of rows",
        "backend.py": "reference kernels",
    },
}  # fmt: skip
TITLE = "The judge imports the engine tools, the backends and the specification. The backends import the specification."
WIDTH, COLUMNS, BOX, GAP = 960, 4, 44, 8  # pixels; COLUMNS: boxes per row
ARROW = 34  # pixels between two parts


def draw_architecture() -> str:
    """Return the diagram as SVG, with its own background, so that it is readable on a dark page."""
    elements, y = list[str](), 12
    for (title, folder), modules in PARTS.items():
        height = 34 + -(-len(modules) // COLUMNS) * (BOX + GAP)
        elements.append(f'<rect x="8" y="{y}" width="{WIDTH - 16}" height="{height}" rx="6" fill="#eef2f7" stroke="#6b7a90"/>')
        elements.append(f'<text x="20" y="{y + 21}" font-weight="bold">{title}: {folder}</text>')
        for number, (name, about) in enumerate(modules.items()):
            assert (ROOT / folder / name).exists(), name  # no entry for a module that was removed
            elements += _draw_module(name, about, number, y + 32)
        y += height + ARROW
        if title != "the specification":
            arrow = f"M {WIDTH / 2} {y - 32} v 22 m -6 -8 l 6 8 l 6 -8"
            elements.append(f'<path d="{arrow}" fill="none" stroke="#33415c" stroke-width="2"/>')
            elements.append(f'<text x="{WIDTH / 2 + 14}" y="{y - 16}" font-size="12">imports</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - ARROW + 12}" role="img" font-family="sans-serif" '
        f'font-size="14" fill="#14213d"><title>{TITLE}</title><rect width="100%" height="100%" fill="#ffffff"/>\n'
        + "\n".join(elements)
        + "\n</svg>\n"
    )


def _draw_module(name: str, about: str, number: int, top: int) -> list[str]:
    width = (WIDTH - 40 - (COLUMNS - 1) * GAP) / COLUMNS
    x, y = 20 + number % COLUMNS * (width + GAP), top + number // COLUMNS * (BOX + GAP)
    return [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}" rx="4" fill="#ffffff" stroke="#9aa7ba"/>',
        f'<text x="{x + 8:.1f}" y="{y + 18}" font-family="monospace" font-size="13">{name}</text>',
        f'<text x="{x + 8:.1f}" y="{y + 35}" font-size="12">{escape(about)}</text>',
    ]
