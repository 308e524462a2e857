"""Each operation of each family once, with right arguments, in an order in which each has something to work on."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray

HEADS = 2

Got = dict[str, Any]  # what each operation gave, of those that were not declined
Step = tuple[str, Callable[[Got], dict[str, Any]]]  # raises KeyError where what it would be given was declined


def steps(family: str, dim: int, format: str) -> list[Step]:
    """The steps of a family, on rows of `dim` numbers; `format` is one for rows or elements."""

    def rows(*shape: int) -> NDArray:
        return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)

    def of(**args: Any) -> Callable[[Got], dict[str, Any]]:
        return lambda got: {name: value(got) if callable(value) else value for name, value in args.items()}

    def sequence(got: Got) -> Any:
        return got["paged.create"]

    def sequences(got: Got) -> Any:
        return [got["paged.create"]]

    tokens, query = rows(2, HEADS, dim), rows(1, HEADS, dim)
    lanes, batch = rows(1, HEADS, 2, dim), rows(1, HEADS, dim)
    here: dict[str, Any] = {"sequence": sequence, "layer": 0}
    table: dict[str, dict[str, Any]] = {
        "elements": {"encode": of(values=rows(dim), format=format), "decode": of(codes=np.zeros(dim, np.uint8), format=format)},
        "rows": {
            "quantize": of(rows=rows(2, dim), format=format),
            "dequantize": of(
                codes=lambda got: got["rows.quantize"][0], scale=lambda got: got["rows.quantize"][1],
                zero=lambda got: got["rows.quantize"][2], width=dim, format=format,
            ),
            "mean_absolute_error": of(rows=rows(2, dim), format=format),
        },
        "kernels": {
            "scatter": of(store=rows(4, HEADS, dim), slots=np.array([1, -1]), new=tokens),
            "gather": of(store=rows(4, HEADS, dim), slots=np.array([3, 0])),
            "update": of(buffer=rows(1, HEADS, 4, dim), new=lanes, position=1),
        },
        "attention": {
            "attention": of(query=query, keys=tokens, values=tokens, scale=1.0, causal=False, length=2),
        },
        "contiguous": {
            "append": of(keys=lanes, values=lanes), "append_fused": of(key_values=np.stack([lanes, lanes])), "seq_len": of(),
            "capacity": of(), "read": of(), "raw": of(), "advance": of(count=0), "reset": of(),
        },
        "blocks": {
            "num_blocks": of(), "num_free": of(), "num_used": of(), "utilization": of(), "allocate": of(),
            "allocate_many": of(count=1), "free": of(block=lambda got: got["blocks.allocate"]),
        },
        "paged": {
            "create": of(), "ensure_capacity": of(sequence=sequence, num_tokens=2),
            "write": of(**here, start=0, keys=tokens, values=tokens),
            "append": of(sequences=sequences, layer=1, keys=batch, values=batch),
            "append_step": of(sequences=sequences, keys=np.stack([batch, batch]), values=np.stack([batch, batch])),
            "length": of(**here), "lengths": of(sequences=sequences, layer=0), "gather": of(**here),
            "gather_batch": of(sequences=sequences, layer=0), "read": of(**here, positions=[1, 0]), "block_table": of(**here),
            "block_tables": of(sequences=sequences, layer=0), "slot_mapping": of(**here, start=0, count=2),
            "num_free_blocks": of(), "utilization": of(), "attend": of(**here, query=query, scale=1.0),
            "drop": of(sequence=sequence),
        },
        "quantized": {
            "append": of(layer=0, keys=tokens, values=tokens), "append_step": of(keys=tokens, values=tokens),
            "length": of(layer=0), "read_head": of(layer=0, position=0, head=1), "read_token": of(layer=0, position=0),
            "read_tokens": of(layer=0, positions=[1, 0]), "memory_bytes": of(), "fp32_bytes": of(), "compression_ratio": of(),
            "attend": of(layer=0, query=query, scale=1.0), "clear": of(),
        },
        "tiered": {
            "append": of(keys=tokens, values=tokens), "total_tokens": of(), "read": of(), "tier_of": of(position=0),
            "stats": of(), "attend": of(query=query, scale=1.0), "update_policy": of(tail_length=2), "clear": of(),
        },
        "buffers": {
            "acquire": of(num_bytes=4 * dim), "prewarm": of(size=1024, count=1), "stats": of(), "clear": of(),
        },
        "buffer": {
            "size": of(), "capacity": of(), "length": of(), "address": of(), "extend": of(values=rows(dim)), "values": of(),
            "clear": of(), "release": of(),
        },
        "pooled": {
            "append": of(keys=tokens, values=tokens), "total_tokens": of(), "read": of(), "stats": of(), "clear": of(),
        },
    }  # fmt: skip
    owners = ("buffers", "buffer") if family == "buffers" else (family,)
    return [(f"{owner}.{name}", arguments) for owner in owners for name, arguments in table[owner].items()]
