"""Results of an operation with the wrong type: a failure with a trace, and the run continues."""

import json

import numpy as np
import pytest

import kvref
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort


class Odd(OnBackend):
    """kvref's cache, except that one operation returns another type than the interface declares."""

    def __init__(self, family, operation, answer):
        super().__init__(kvref.reference)
        make = getattr(self, family)
        self.name = f"odd-{family}-{operation}"

        def odd(*sizes, **named):
            made = make(*sizes, **named)
            wrong = type("Odd", (type(made),), {operation: lambda self, *args, **rest: answer})
            made.__class__ = wrong
            return made

        setattr(self, family, odd)


@pytest.mark.parametrize("answer", [np.zeros((1, 18), np.uint8), [[1], [2]], "nothing"], ids=["array", "lists", "text"])
@pytest.mark.parametrize(
    ("family", "operation"),
    [("rows", "quantize"), ("paged", "gather"), ("offload", "prepare_store"), ("sharded", "block_table"), ("blocks", "allocate")],
)
def test_a_result_of_another_kind_fails_and_is_written_down(family, operation, answer):
    judge, failed = CheckRunner(Odd(family, operation, answer), Effort(examples=3, shrinks=False)), []
    for clause, checks in select_checks(family=family).items():
        wanted = [each for each in checks if not each.slow and not each.real and clause.id != "LAW-18"]
        failed += [each for each in judge.judge_clause(wanted) if each.verdict == "failed"]
    assert failed and all(json.loads(each.trace[0])["failed"] for each in failed if each.trace)
    assert any(each.trace for each in failed)
