"""One call of each operation, for the self-test of a harness."""

from typing import Any

from kvref_conformance.checking.steps import Got, Sizes, Steps, of, owned, rows


def sequence(got: Got) -> Any:
    return got["grouped.create"]


def steps(sizes: Sizes) -> Steps:
    step = rows(sizes.layers, 2, sizes.heads, sizes.dim)
    query = rows(1, sizes.heads, sizes.dim)
    here: dict[str, Any] = {"sequence": sequence, "layer": 0}
    return {
        **owned("grouped", {
            "reset": of(), "create": of(), "step": of(sequence=sequence, keys=step, values=step), "length": of(sequence=sequence),
            "read": of(**here, positions=[1, 0]), "block_table": of(**here), "num_free_blocks": of(),
            "attend": of(**here, query=query, scale=1.0), "commit": of(sequence=sequence, tokens=[1, 2]),
            "match": of(tokens=[1, 2, 3]), "begin": of(tokens=[1, 2, 3]), "fork": of(sequence=sequence),
            "truncate": of(sequence=sequence, length=1), "drop": of(sequence=sequence),
        }),
    }  # fmt: skip
