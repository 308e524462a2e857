"""One call of each operation, for the self-test of a harness."""

from typing import Any

from kvref_conformance.checking.steps import Got, Sizes, Steps, of, owned, rows


def sequence(got: Got) -> Any:
    return got["paged.create"]


def sequences(got: Got) -> Any:
    return [got["paged.create"]]


def steps(sizes: Sizes) -> Steps:
    tokens = rows(2, sizes.heads, sizes.dim)
    query = rows(1, sizes.heads, sizes.dim)
    batch = rows(1, sizes.heads, sizes.dim)
    step = rows(sizes.layers, 1, sizes.heads, sizes.dim)
    here: dict[str, Any] = {"sequence": sequence, "layer": 0}
    return {
        **owned("paged", {
            "create": of(), "ensure_capacity": of(sequence=sequence, num_tokens=2),
            "write": of(**here, start=0, keys=tokens, values=tokens),
            "append": of(sequences=sequences, layer=sizes.layers - 1, keys=batch, values=batch),
            "append_step": of(sequences=sequences, keys=step, values=step),
            "length": of(**here), "lengths": of(sequences=sequences, layer=0), "gather": of(**here),
            "gather_batch": of(sequences=sequences, layer=0), "read": of(**here, positions=[1, 0]), "block_table": of(**here),
            "block_tables": of(sequences=sequences, layer=0), "slot_mapping": of(**here, start=0, count=2),
            "num_free_blocks": of(), "utilization": of(), "attend": of(**here, query=query, scale=1.0),
            "fork": of(sequence=sequence), "release_before": of(sequence=sequence, position=0),
            "save": of(sequence=sequence), "load": of(sequence=sequence, data=lambda got: got["paged.save"]),
            "remove": of(sequence=sequence, start=0, stop=0),
            "truncate": of(sequence=sequence, length=0), "drop": of(sequence=sequence),
        }),
    }  # fmt: skip
