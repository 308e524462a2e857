"""Correct engines that support a single canary: everything else is not offered, and nothing fails."""

from typing import ClassVar

import pytest

import kvref.engine
from kvref.canary import sized
from kvref_conformance.calls.messages import CallError, CallReply
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.families.engine import FAMILY
from kvref_conformance.families.engine.model import Engine
from kvref_conformance.families.engine.stateless_adapter import WholePrompts
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort
from kvref_zoo.mutant import NumpyImplementation


class OneCanary(NumpyImplementation):
    name = "one canary"
    limits: ClassVar = {"engine": {"context": 300, "period": 48, "window": 0, "recalls": 0}}

    def engine(self, cache_tokens, **sizes):
        return kvref.engine.Engine(sized(**sizes), cache_tokens)


class Whole(OneCanary):
    def engine(self, cache_tokens, **sizes):
        return Prompts(sized(**sizes))


class Prompts(WholePrompts):
    def complete(self, prompts, count):
        return [self.alone(prompt, count) for prompt in prompts]

    def alone(self, prompt, count):
        engine = kvref.engine.Engine(self.canary, self.canary.context)
        session = engine.open()
        engine.extend(session, prompt)
        return engine.generate(session, count)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("right", "missing"),
    [pytest.param(OneCanary, {"ENG-13"}, marks=pytest.mark.long), (Whole, {"ENG-08", "ENG-09", "ENG-10", "ENG-11", "ENG-13"})],
)
def test_a_right_engine_breaks_nothing(right, missing):
    judge = CheckRunner(right(), Effort(examples=2, timeout=60))
    found = {clause.id: verdict_of(judge.judge_clause(checks)) for clause, checks in select_checks("ENG-*").items()}
    assert {clause for clause, verdict in found.items() if verdict != "passed"} == missing
    assert {found[clause] for clause in missing} == {"not offered"}


def test_a_number_that_is_taken_is_no_new_one_in_a_full_cache_either():
    model = Engine(**FAMILY.small | {"cache_tokens": 64})
    reply = CallReply(ok=0)
    model.expect("open", {}).judge(reply, "engine.open", "exact")
    model.expect("extend", {"session": 0, "tokens": [1, 5, 6]}).judge(CallReply(), "engine.extend", "exact")
    model.expect("save", {"session": 0}).judge(reply, "engine.save", "exact")
    for op, args in (("load", {"saved": 0}), ("fork", {"session": 0})):
        with pytest.raises(ClauseViolation, match="a session not among"):
            model.expect(op, args).judge(reply, f"engine.{op}", "exact")
        model.expect(op, args).judge(CallReply(error=CallError("OutOfBlocks", "")), f"engine.{op}", "exact")
