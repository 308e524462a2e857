"""The reference model of the family `recurrent`: a list of tokens."""

from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    ExactValue,
    Expectation,
    ExpectedArrays,
    all_finite,
    array_errors,
    count_tokens,
    exact_reads,
    finite_errors,
    to_float32,
)
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel


class Recurrent(ReferenceModel):
    family = "recurrent"
    clause_by_observation: ClassVar = {
        ("clear", "length"): "RECURRENT-03",
        ("clear", "read"): "RECURRENT-03",
        "length": "RECURRENT-01",
        "read": "RECURRENT-01",
    }

    def __init__(self, *, num_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        super().__init__()
        self.row, self.most = (num_kv_heads, head_dim), max_tokens
        self.tokens: list[tuple[NDArray, NDArray]] = []

    def observations(self) -> list[ReadCall]:
        return [("length", {}), ("read", {})]

    def length(self) -> Expectation:
        return ExactValue(self.clause_of("length"), value=len(self.tokens))

    def append(self, keys: Any, values: Any) -> Expectation:
        given = (keys, (None, *self.row)), (values, (None, *self.row))
        wrong = array_errors(*given)
        if len(self.tokens) + count_tokens(*given) > self.most:
            wrong.append(("CapacityExceeded", "RECURRENT-02"))
        if wrong:
            return self.expect_error(wrong + finite_errors(keys, values))
        then = self.on_success("append", lambda ok: self.tokens.extend(zip(to_float32(keys), to_float32(values), strict=True)))
        return Expectation("RECURRENT-01", then) if all_finite(keys, values) else AcceptedOrError("RECURRENT-01", then)

    def read(self) -> Expectation:
        keys, values = (np.array([token[part] for token in self.tokens], np.float32).reshape(-1, *self.row) for part in (0, 1))
        return ExpectedArrays(self.clause_of("read"), names=("keys", "values"), parts=(exact_reads(keys), exact_reads(values)))

    def clear(self) -> Expectation:
        return Expectation("RECURRENT-03", self.on_success("clear", lambda ok: self.tokens.clear()))
