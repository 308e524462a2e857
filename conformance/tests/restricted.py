"""kvref's own caches with declared limits: `kvref check restricted:FLOAT16` (in this folder)."""

from kvref_conformance.runner.restricted import RestrictedImplementation as Restricted

LIMITS = {
    "float16 only": {"dtype": ["float16"]},
    "bfloat16 only": {"dtype": ["bfloat16"]},
    "head_dim of 64 or 128": {"head_dim": [64, 128]},
    "blocks of 16": {"block_size": 16, "tokens_per_block": 16},
    "blocks of 1": {"block_size": 1, "tokens_per_block": 1},
    "one layer": {"num_layers": 1},
    "one kv head": {"num_kv_heads": 1},
    "one sequence at a time": {"sequences": {"most": 1}},
    "one token at a time": {"tokens": {"most": 1}},
    "one batch row": {"batch_size": 1},
    "no negative integers": {"negative_integers": False},
    "token hits": {"token_hits": True},
}

FLOAT16 = Restricted(LIMITS["float16 only"])
KERNELS = Restricted({"dtype": ["float16"], "head_dim": [64, 128], "block_size": 16})
ONE = Restricted({"num_layers": 1, "num_kv_heads": 1, "batch_size": 1, "block_size": 16})
