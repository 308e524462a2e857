"""The traces that the player shows: scripted calls to the reference, one script per trace, and shrunk failures of the zoo."""

from pathlib import Path

from kvref_conformance.runner.zoo_report import judge_member
from player_traces import caches, recurrent, rows, sharing, windows
from player_traces.recorder import TraceRecorder

SCRIPTS = {
    "decoding": caches.record_decoding, "contiguous": caches.record_contiguous, "paged": caches.record_paged,
    "sharing": sharing.record_sharing, "truncation": sharing.record_truncation, "prefixes": sharing.record_prefixes,
    "quantized": caches.record_quantized, "tiered": caches.record_tiered, "windows": windows.record_windows,
    "recurrent": recurrent.record_recurrent, "pooled": caches.record_pooled, "canary": caches.record_canary,
    "tree": rows.record_tree, "ragged": rows.record_ragged, "pruned": rows.record_pruned,
}  # fmt: skip
ZOO_MEMBERS = (
    "blocks-freed-twice", "paged-reads-past-the-length", "quantized-drops-its-scale", "tiered-wraps-one-early",
    "attention-nan-past-the-end", "paged-leaks-a-block",
)  # fmt: skip


def write_traces(folder: Path) -> None:
    """Write one trace per script and per zoo member into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    traces = {name: TraceRecorder().record(script) for name, script in SCRIPTS.items()}
    traces |= {name: judge_member(name).shortest.trace for name in ZOO_MEMBERS}
    for name, lines in traces.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
