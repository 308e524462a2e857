"""Bugs to plant in the reference, one module per chapter. Many are real: see the *differs from* and *would have caught* lines."""

from importlib import import_module

from bugs.plant import BUGS, HIDDEN, REAL

CHAPTERS = (
    "laws",
    "formats",
    "group_formats",
    "given_formats",
    "contiguous",
    "paged",
    "page_formats",
    "sharing",
    "prefixes",
    "groups",
    "told",
    "windows",
    "layers",
    "quantized",
    "channels",
    "tiered",
    "any_format",
    "given_in_caches",
    "edits",
    "moving",
    "moving_formats",
    "moving_parts",
    "buffers",
    "pooled",
    "latents",
    "sharded",
    "sharded_deep",
    "attention",
    "kernels",
    "moving_offload",
    "moving_deep",
    "engines",
    "hidden",
    "real",
    "real_pages",
)

for chapter in CHAPTERS:
    import_module(f"bugs.{chapter}")

__all__ = ["BUGS", "HIDDEN", "REAL"]
