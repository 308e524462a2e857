"""Follows a conversation with any number of objects, and says of each request what the reply must be."""

from typing import Any

import numpy as np

from kvref_conformance.exchange import Exchange, On, Request, resolved
from kvref_conformance.interface import Level
from kvref_conformance.oracle.blocks import Blocks
from kvref_conformance.oracle.buffers import Buffer, Buffers
from kvref_conformance.oracle.contiguous import Contiguous
from kvref_conformance.oracle.expected import Choice, Expected, Refused, not_in_range
from kvref_conformance.oracle.functions import Attention, Elements, Kernels, Rows
from kvref_conformance.oracle.model import Model
from kvref_conformance.oracle.paged import Paged
from kvref_conformance.oracle.pooled import Pooled
from kvref_conformance.oracle.quantized import Quantized
from kvref_conformance.oracle.rows import AFFINE, SYMMETRIC
from kvref_conformance.oracle.tiered import PLAIN, Tiered
from kvref_conformance.outcome import Broken

MODELS: dict[str, Any] = {
    model.family: model
    for model in (
        Elements, Rows, Kernels, Attention, Contiguous, Blocks, Paged, Quantized, Tiered, Buffers, Pooled,
    )
}  # fmt: skip
# The clauses that the models of each family with a machine can name; LAW-16 is the driver's, which compares what was handed in
# with what is left.
_LAWS = ("LAW-01", "LAW-04", "LAW-05", "LAW-10", "LAW-11", "LAW-12", "LAW-16", "FMT-LEVEL-04")
SPEAKS_FOR = {
    "contiguous": (*_LAWS, *(f"CONTIG-{n:02}" for n in (*range(1, 8), *range(9, 13)))),
    "blocks": ("LAW-03", "LAW-11", "LAW-12", *(f"BLOCK-{n:02}" for n in range(1, 8))),
    "paged": (*_LAWS, "LAW-02", "LAW-03", *(f"PAGED-{n:02}" for n in (*range(1, 14), 15, 16, 17)), "ATTN-10"),
    "quantized": (*_LAWS, *(f"QUANT-{n:02}" for n in (1, 2, 4, 5, 7, 8)), "ATTN-10"),
    "tiered": (*_LAWS, *(f"TIER-{n:02}" for n in (1, 2, 3, 5, 6, 7, 8, 10, 13, 14)), "ATTN-10"),
    "buffers": ("LAW-05", "LAW-12", "LAW-16", *(f"BUF-{n:02}" for n in (*range(1, 8), 9))),
    "pooled": (*(law for law in _LAWS if law != "LAW-11"), *(f"POOL-{n:02}" for n in range(1, 7))),
}
MAY_BE_ZERO = ("initial_capacity", "tail_length", "warm_length", "num_blocks")
FORMATS = {
    "dtype": PLAIN, "tail_dtype": PLAIN, "format": SYMMETRIC,
    "warm_format": SYMMETRIC + AFFINE, "store_format": SYMMETRIC + AFFINE,
}  # fmt: skip


class Unknown(Exception):
    """A request that no model speaks for."""


class Witness:
    def __init__(self, level: Level) -> None:
        self.level = level
        self.models: dict[int, Model] = {}
        self.replies: dict[int, Any] = {}

    def expect(self, request: Request) -> Expected:
        """What the reply must be, before it is seen. Raises Unknown."""
        try:
            args = {name: self._argument(value) for name, value in request.args.items()}
            if request.name == "new":
                return self._new(request, args)
            expected = self.models[request.on or 0].expect(request.name, args)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise Unknown(f"{request.op} with these arguments: {type(error).__name__}: {error}") from error
        if request.op == "buffers.acquire" and isinstance(expected, Choice):
            return Choice(expected.clause, lambda ok: self._acquired(request, args, expected, ok), says=expected.says)
        return expected

    def judge(self, exchange: Exchange, expected: Expected) -> None:
        """Raise Broken, with the clause, unless the reply is as expected; take note of it if it is."""
        if exchange.reply is None:
            raise Broken(exchange.request.op, "an answer", "none", expected.clause)
        expected.judge(exchange.reply, exchange.request.op, self.level)
        self.replies[exchange.request.id] = exchange.reply.ok

    def _argument(self, value: Any) -> Any:
        """What a model takes: integers of NumPy's types are as good as Python's (LAW-20)."""
        if isinstance(value, On):
            return self.models[value.id]
        if isinstance(value, list):
            return [self._argument(part) for part in value]
        return int(value) if isinstance(value, np.integer) else resolved(value, self.replies)

    def _new(self, request: Request, args: dict[str, Any]) -> Expected:
        if request.family not in MODELS:
            raise Unknown(request.op)
        if not sensible(request.family, args):
            return Refused("LAW-12", kinds=("ConfigError",))
        model: Model = MODELS[request.family](**args)
        return Expected("LAW-12", lambda ok: self.models.update({request.id: model}))

    def _acquired(self, request: Request, args: dict[str, Any], expected: Choice, ok: Any) -> None:
        pool = self.models[request.on or 0]
        assert isinstance(pool, Buffers)
        expected.then(ok)
        self.models[request.id] = Buffer(pool, args["num_bytes"])


def sensible(family: str, config: dict[str, Any]) -> bool:
    """Whether a configuration makes sense (LAW-12)."""
    for name, value in config.items():
        if name in FORMATS:
            if value not in FORMATS[name]:
                return False
        elif name != "pool" and (not_in_range(value, None, "") or (value == 0 and name not in MAY_BE_ZERO)):
            return False
    if family == "tiered":
        return bool(config["tail_length"] + config["warm_length"] <= config["max_tokens"])
    return bool(family != "pooled" or config["tokens_per_block"] <= config["max_tokens"])
