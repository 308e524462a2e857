"""Follows a call trace with any number of objects, and predicts the reply to each request."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import (
    CallReply,
    CallRequest,
    Exchange,
    MalformedResult,
    ObjectReference,
    resolve_references,
)
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.families import Family, all_families
from kvref_conformance.implementation_api import Implementation, Level
from kvref_conformance.limits import Limits, describe_refusal
from kvref_conformance.oracle.attention import output_rounding
from kvref_conformance.oracle.expectations import Expectation, ExpectedArrays, ExpectedError, NewResult, range_errors
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.reference_model import ReferenceModel

EXPECTED_OBJECT = "an object, because its sizes are valid and within the limits (LAW-12)"


@dataclass(frozen=True)
class CreatedObject(Expectation):
    """The expectation of a new object. If the factory raises, the message names LAW-12, whichever clause is judged."""

    family: str = ""

    def judge(self, reply: CallReply, op: str, level: Level) -> None:
        if reply.error:
            got = describe_refusal(self.family, reply.error.kind, reply.error.message)
            raise ClauseViolation(op, self.describe(), got, self.clause)
        super().judge(reply, op, level)

    def describe(self) -> str:
        return EXPECTED_OBJECT


class UnknownObject(Exception):
    """A request that no model covers."""


class ModelRunner:
    """The models of all objects of a call trace. For each request: call `expect`, make the call, call `judge`.

    models: by the id of the request that created the object. replies: results by the id of the request. saved_states: see
    oracle.saved_state.
    """

    def __init__(self, level: Level, limits: Limits | None = None) -> None:
        """level, limits: those of the implementation."""
        self.level, self.limits = level, limits or Limits()
        self.models: dict[int, ReferenceModel] = {}
        self.replies: dict[int, Any] = {}
        self.saved_states: dict[bytes, Any] = {}

    @classmethod
    def of(cls, implementation: Implementation) -> "ModelRunner":
        """A new one with the level and the limits of an implementation."""
        return cls(implementation.level, Limits(getattr(implementation, "limits", None)))

    def expect(self, request: CallRequest) -> Expectation:
        """The expected reply to a request. Raises UnknownObject if no model covers it."""
        try:
            args = {name: self._argument(value) for name, value in request.args.items()}
            if request.name == "new":
                return self._expect_new(request, args)
            expected = self.models[request.on or 0].expect(request.name, args)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise UnknownObject(f"{request.op} with these arguments: {type(error).__name__}: {error}") from error
        if isinstance(expected, NewResult):
            return replace(expected, on_result=lambda ok: self._add_object(request, expected, ok))
        if (
            isinstance(expected, ExpectedArrays) and expected.always_slack
        ):  # a computed result, rounded to the dtype of the arguments
            dtype = self.limits.dtypes(request.family)[0]
            rounded = self.limits.switch(request.family, "rounded_weights")
            more = expected.weight_slack(dtype) if rounded and expected.weight_slack else 0.0
            slacks = [part.slack + more for part in expected.parts]
            slacks = [
                slack + output_rounding(part.values, slack, dtype) for part, slack in zip(expected.parts, slacks, strict=True)
            ]
            parts = zip(expected.parts, slacks, strict=True)
            return replace(expected, parts=tuple(ExpectedReads(part.values, slack) for part, slack in parts))
        return expected

    def judge(self, exchange: Exchange, expected: Expectation) -> None:
        """Raise ClauseViolation, with the clause, if the reply is wrong. Otherwise update the models."""
        if exchange.reply is None:
            raise ClauseViolation(exchange.request.op, "a reply", "none", expected.clause)
        if isinstance(exchange.reply.ok, MalformedResult):
            raise ClauseViolation(
                exchange.request.op, "a result of the type in the interface", exchange.reply.ok, expected.clause
            )
        expected.judge(exchange.reply, exchange.request.op, self.level)
        self.replies[exchange.request.id] = exchange.reply.ok
        if exchange.request.on in self.models:
            self.models[exchange.request.on].note_correct()

    def _argument(self, value: Any) -> Any:
        """An argument for a model: references are resolved, NumPy integers become Python integers (LAW-20)."""
        if isinstance(value, ObjectReference):
            return self.models[value.id]
        if isinstance(value, list):  # often thousands of integers, hence the fast path
            return list(value) if set(map(type, value)) == {int} else [self._argument(part) for part in value]
        return int(value) if isinstance(value, np.integer) else resolve_references(value, self.replies)

    def _expect_new(self, request: CallRequest, args: dict[str, Any]) -> Expectation:
        family = all_families().get(request.family)
        if family is None:
            raise UnknownObject(request.op)
        if not is_valid_config(family, args):
            return ExpectedError("LAW-12", kinds=("ConfigError",))
        model: ReferenceModel = family.model(**args)
        model.saved_states = self.saved_states
        model.apply_limits(partial(self.limits.switch, family.name))
        return CreatedObject("LAW-12", lambda ok: self.models.update({request.id: model}), family.name)

    def _add_object(self, request: CallRequest, expected: NewResult, ok: Any) -> None:
        expected.on_result(ok)
        self.models[request.id] = expected.model()


def is_valid_config(family: Family, config: dict[str, Any]) -> bool:
    """Whether a configuration is valid (LAW-12)."""
    for name, value in config.items():
        if name in family.formats:
            if value not in family.formats[name]:
                return False
        elif name in family.small and (range_errors(value, None, "") or (value == 0 and name not in family.may_be_zero)):
            return False
    return family.together(config)
