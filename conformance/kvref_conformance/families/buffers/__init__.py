"""The family `buffers`: the buffer pool with size classes, and its buffers."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="buffers",
    chapter="buffers",
    small={"max_buffers": 4},
    speaks_for=("LAW-05", "LAW-12", "LAW-16", *(f"BUF-{n:02}" for n in (*range(1, 8), 9))),
    gives={"acquire": "buffer"},
)
