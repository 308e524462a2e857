"""LAW-11: if a call is wrong in several ways, any of the right errors passes, and no other."""

import random

import numpy as np
import pytest
from argument_orders import Implementation

from kvref_conformance.calls.messages import CallReply, CallRequest, Exchange, ObjectReference
from kvref_conformance.calls.operation_table import operations
from kvref_conformance.oracle.expectations import ExpectedError
from kvref_conformance.oracle.model_runner import ModelRunner
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

FAMILIES = (
    "contiguous", "paged", "quantized", "tiered", "pooled", "windowed", "latent", "grouped", "channels", "sharded", "transfer",
    "recurrent", "ragged", "tree", "cross", "compressed",
)  # fmt: skip
PICKS = {"the last": lambda wrong: wrong[-1], "any": random.Random(0).choice}


@pytest.mark.long
@pytest.mark.parametrize("pick", ["the last", "any"])
def test_a_right_cache_may_look_in_any_order(pick):
    judge = CheckRunner(Implementation(PICKS[pick]), Effort(examples=8))
    failed = {
        clause.id
        for clause, checks in select_checks().items()
        if clause.id != "LAW-18"  # errors do not depend on production sizes
        and verdict_of(judge.judge_clause([check for check in checks if check.family in FAMILIES])) == "failed"
    }
    assert failed == set()


ROW = np.ones((1, 1, 2), np.float32)
ROWS = np.ones((9, 1, 2), np.float32)
WIDE = np.ones((1, 1, 3), np.float32)
DOUBLE = WIDE.astype(np.float64)
NAN = np.full((1, 1, 3), np.nan, np.float32)
SEQ, LAY, POS, OUT = "SequenceNotFound", "LayerOutOfRange", "PositionOutOfRange", "OutOfBlocks"
SHAPE, DTYPE, FINITE, FULL = "ShapeMismatch", "DtypeMismatch", "NonFinite", "CapacityExceeded"

# A paged cache of 8 blocks of 2 tokens in 2 layers, so a sequence can have 8 tokens; sequence 0 has 3 tokens in layer 0.
PAGED = [
    ("write", (7, 0, -1, ROW, ROW), {SEQ, POS}),
    ("write", (7, 0, 1, ROW, ROW), {SEQ}),  # 1 may be the sequence's length
    ("write", (7, 0, 9, ROW, ROW), {SEQ, POS, OUT}),  # no sequence can be that long
    ("write", (7, 2, 0, ROW, ROW), {SEQ, LAY}),
    ("write", (7, 0, 0, WIDE, ROW), {SEQ, SHAPE}),
    ("write", (7, 0, 0, DOUBLE, ROW), {SEQ, SHAPE, DTYPE}),
    ("write", (7, 0, 0, NAN, ROW), {SEQ, SHAPE, FINITE}),
    ("write", (7, 0, 0, ROWS, ROWS), {SEQ, OUT}),  # no sequence can have that many
    ("write", (0, 0, 4, ROW, ROW), {POS}),
    ("write", (0, 0, 4, ROWS, ROWS), {POS, OUT}),
    ("write", (0, 2, 2, ROW, ROW), {LAY}),  # valid in layer 0
    ("write", (0, 2, 4, ROW, ROW), {LAY, POS}),  # valid in no layer
    ("write", (0, 0, 0, ROWS, ROW), {SHAPE, OUT}),
    ("write", (0, 0, 0, ROWS[..., 0], ROWS[..., 0]), {SHAPE}),  # the number of tokens is unknown
    ("append", ([7], 2, ROW, ROW), {SEQ, LAY}),
    ("append", ([], 2, ROW, ROW), {LAY, SHAPE}),
    ("append", ([0] * 6, 0, ROW, ROW), {SHAPE, OUT}),
    ("append", ([7, *[0] * 6], 0, ROWS[:7], ROWS[:7]), {SEQ, OUT}),
    ("append_step", ([7, 0], ROW, ROW), {SEQ, SHAPE}),
    ("ensure_capacity", (7, -1), {SEQ, POS}),
    ("ensure_capacity", (7, 8), {SEQ}),
    ("ensure_capacity", (7, 9), {SEQ, OUT}),
    ("read", (7, 2, [0]), {SEQ, LAY}),
    ("read", (7, 0, [0, -1]), {SEQ, POS}),
    ("slot_mapping", (7, 2, -1, 0), {SEQ, LAY, POS}),
    ("slot_mapping", (0, 2, 0, 5), {LAY, POS}),
    ("gather", (7, -1), {SEQ, LAY}),
    ("attend", (7, 2, WIDE, 1.0), {SEQ, LAY, SHAPE}),
]  # fmt: skip
QUANTIZED = [
    ("append", (2, WIDE, ROW), {LAY, SHAPE}),
    ("append", (0, WIDE, ROW), {SHAPE, FULL}),  # layer 0 is full, layer 1 is not
    ("append", (2, ROW, ROW), {LAY}),
    ("append", (0, ROW * np.inf, ROW), {FINITE, FULL}),
    ("append", (2, ROWS, ROWS), {LAY, FULL}),  # no layer has room for that many
    ("append", (0, ROW[0], ROW[0]), {SHAPE}),
    ("append_step", (WIDE, WIDE), {SHAPE, FULL}),
    ("read_head", (0, 1, 1), {POS, "HeadOutOfRange"}),
    ("read_head", (2, 0, 1), {LAY, "HeadOutOfRange"}),
    ("read_head", (2, 1, 0), {LAY, POS}),
    ("attend", (2, DOUBLE, 1.0), {LAY, SHAPE, DTYPE}),
]
CONTIGUOUS = [
    ("append", (np.ones((1, 1, 9, 2), np.float32), WIDE[None]), {SHAPE, FULL}),
    ("append", (DOUBLE[None], DOUBLE[None]), {SHAPE, DTYPE}),
    ("append", (np.full((1, 1, 9, 2), np.nan, np.float32),) * 2, {FULL, FINITE}),
    ("append_fused", (np.full((2, 1, 1, 9, 3), np.nan),), {SHAPE, DTYPE, FINITE, FULL}),
]
TIERED = [
    ("append", (NAN, ROW), {SHAPE, FINITE}),
    ("append", (WIDE * np.float32(1e38), ROW), {SHAPE, FINITE}),  # more than its tail can store
]
LONG = np.ones((1, 1, 70_000), np.float32)  # larger than any buffer
POOLED = [("append", (np.full((1, 1, 70_001), np.nan, np.float32), LONG), {SHAPE, FINITE, "BufferTooLarge"})]
# A window of 2 tokens and 1 sink token, after 4 tokens.
WINDOWED = [
    ("append", (WIDE, ROWS), {SHAPE}),
    ("append", (NAN, DOUBLE), {SHAPE, DTYPE, FINITE}),
    ("step", (WIDE, ROW, ROW, 1.0), {SHAPE}),
    ("step", (DOUBLE, ROWS, ROW * np.inf, 1.0), {SHAPE, DTYPE, FINITE}),
    ("attend", (DOUBLE, 1.0), {SHAPE, DTYPE}),
    ("read", ([3, 4],), {POS}),
]
# Latents: rows of 2 and 1 numbers, 1 token of a maximum of 2.
LATENT = [
    ("append", (ROW[0], ROW[0]), {SHAPE}),
    ("append", (ROWS[:, 0], ROWS[:, 0, :1]), {"CapacityExceeded"}),
    ("append", (ROWS[:, 0], ROW[0]), {SHAPE, FULL}),
    ("append", (np.full((2, 2), np.nan), np.ones((2, 1), np.float32)), {DTYPE, FINITE, FULL}),
]
# KIVI: a head of 32 numbers, 1 token of a maximum of 33.
KEY = np.ones((1, 1, 32), np.float32)
CHANNELS = [
    ("append", (KEY, KEY[0]), {SHAPE}),
    ("append", (KEY.repeat(33, axis=0),) * 2, {FULL}),
    ("append", (KEY.repeat(33, axis=0), KEY), {SHAPE, FULL}),
    ("append", (KEY * np.inf, KEY), {FINITE}),
    ("append", (KEY * np.float32(7e4), KEY.astype(np.float64)), {DTYPE, FINITE}),  # larger than a group can store
    ("read", ([0, 1],), {POS}),
]
# Groups: 2 layers in 2 groups over 8 blocks of 2 tokens; sequence 0 has 3 tokens.
STEP = np.ones((2, 1, 1, 2), np.float32)
GROUPED = [
    ("step", (7, STEP, ROW), {SEQ, SHAPE}),
    ("step", (7, STEP * np.inf, STEP.astype(np.float64)), {SEQ, DTYPE, FINITE}),
    ("step", (0, np.ones((2, 40, 1, 3), np.float32), STEP), {SHAPE, OUT}),
    ("read", (7, 2, [0, -1]), {SEQ, LAY, POS}),
    ("attend", (7, 2, WIDE, 1.0), {SEQ, LAY, SHAPE}),
    ("commit", (7, [-1]), {SEQ, POS, "TokenOutOfRange"}),
]
# States: 2 layers, 1 head, 2 inputs of 2 channels, matrices of 2 x 2; sequence 0 has 1 token, which is committed.
TOKEN, GATES = np.ones((2, 1, 1, 2), np.float32), np.ones((2, 1, 1, 2), np.float32)
TOKENS = (TOKEN, TOKEN, TOKEN, GATES)
BATCH = tuple(each[:, None] for each in TOKENS)
RECURRENT = [
    ("append", (7, *TOKENS[:3], GATES[..., :1]), {SEQ, SHAPE}),
    ("append", (7, TOKEN * np.inf, TOKEN.astype(np.float64), TOKEN, GATES), {SEQ, DTYPE, FINITE}),
    ("append", (0, TOKEN, TOKEN[:1], TOKEN * np.nan, GATES), {SHAPE, FINITE}),
    ("append_batch", ([0, 7], [1, 2], *BATCH), {SEQ, SHAPE, POS}),
    ("append_batch", ([7], [-1], *BATCH[:3], BATCH[3].astype(np.float64)), {SEQ, POS, DTYPE}),
    ("read_matrix", (7, 2), {SEQ, LAY}),
    ("apply", (7, -1, WIDE), {SEQ, LAY, SHAPE}),
    ("truncate", (7, -1), {SEQ, POS}),
    ("truncate", (7, 1), {SEQ}),  # 1 may be the sequence's length
    ("commit", (0, [5, -1]), {POS, "TokenOutOfRange", "TokenMismatch"}),
    ("commit", (7, [-1]), {SEQ, POS, "TokenOutOfRange"}),
    ("fork", (7,), {SEQ, OUT}),  # no block is free
    ("checkpoint", (7,), {SEQ, OUT}),
    ("begin", ([-1], ""), {OUT, "TokenOutOfRange"}),
]
STORE = np.zeros((4, 2), np.float32)
KERNELS = [("scatter", (STORE, np.array([4]), STORE[:2]), {SHAPE, "SlotOutOfRange"})]

NEW = {
    "paged": {"num_blocks": 8, "block_size": 2, "num_layers": 2, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"},
    "quantized": {"num_layers": 2, "capacity": 1, "num_kv_heads": 1, "head_dim": 2, "format": "int8"},
    "contiguous": {
        "batch_size": 1, "num_kv_heads": 1, "head_dim": 2, "initial_capacity": 1, "max_seq_len": 4, "dtype": "float32",
    },
    "tiered": {
        "num_kv_heads": 1, "head_dim": 2, "max_tokens": 4, "tail_length": 2, "tail_dtype": "float16", "warm_length": 0,
        "warm_format": "q8", "store_format": "q4", "migration_batch": 1,
    },
    "pooled": {"num_kv_heads": 1, "head_dim": 70_000, "tokens_per_block": 1, "max_tokens": 4},
    "windowed": {"num_kv_heads": 1, "head_dim": 2, "window": 2, "sinks": 1, "chunk": 0, "rollback": 0, "dtype": "float32"},
    "latent": {"rank": 2, "rope_dim": 1, "max_tokens": 2, "dtype": "float32"},
    "channels": {
        "num_kv_heads": 1, "head_dim": 32, "max_tokens": 33, "residual": 32, "format": "uint4_g32_float16", "dtype": "float32",
        "rollback": 0,
    },
    "grouped": {
        "num_blocks": 8, "block_size": 2, "num_layers": 2, "num_groups": 2, "window": 2, "num_kv_heads": 1, "head_dim": 2,
        "dtype": "float32",
    },
    "recurrent": {
        "num_blocks": 1, "num_layers": 2, "num_heads": 1, "channels": 2, "num_inputs": 2, "key_dim": 2, "value_dim": 2,
        "delta_rule": 0, "max_drafts": 0, "interval": 1, "dtype": "float32", "matrix_dtype": "float32",
    },
    "kernels": {},
}  # fmt: skip
BEFORE = {
    "paged": [("create", (), 0), ("write", (0, 0, 0, ROWS[:3], ROWS[:3]), None)],
    "quantized": [("append", (0, ROW, ROW), None)],
    "windowed": [("append", (ROWS[:4], ROWS[:4]), None)],
    "latent": [("append", (ROW[0], ROW[0, :, :1]), None)],
    "channels": [("append", (KEY, KEY), None)],
    "grouped": [("create", (), 0), ("step", (0, *[np.ones((2, 3, 1, 2), np.float32)] * 2), None)],
    "recurrent": [("create", (), 0), ("append", (0, *TOKENS), None), ("commit", (0, [4]), None)],
}
CALLS = {
    "paged": PAGED, "quantized": QUANTIZED, "contiguous": CONTIGUOUS, "tiered": TIERED, "pooled": POOLED, "windowed": WINDOWED,
    "latent": LATENT, "channels": CHANNELS, "grouped": GROUPED, "kernels": KERNELS,
    "recurrent": RECURRENT,
}  # fmt: skip


def said(witness, number, family, name, args):
    """A request to the first object, in the form that the witness receives."""
    names = operations(family)[name].parameters
    request = CallRequest(number, f"{family}.{name}", 1, dict(zip(names, args, strict=True)))
    return request, witness.expect(request)


EACH = [
    pytest.param(family, *call, id=f"{family}-{call[0]}-{i}") for family, calls in CALLS.items() for i, call in enumerate(calls)
]


@pytest.mark.parametrize(("family", "name", "args", "kinds"), EACH)
def test_what_may_be_said_of_a_call(family, name, args, kinds):
    models = ModelRunner("exact")
    new = CallRequest(1, f"{family}.new", None, NEW[family])
    models.judge(Exchange(new, CallReply(ObjectReference(1))), models.expect(new))
    for number, (before, given, reply) in enumerate(BEFORE.get(family, ()), start=2):
        request, expected = said(models, number, family, before, given)
        models.judge(Exchange(request, CallReply(reply)), expected)
    _, expected = said(models, 9, family, name, args)
    assert isinstance(expected, ExpectedError)
    assert set(expected.kinds) == kinds
