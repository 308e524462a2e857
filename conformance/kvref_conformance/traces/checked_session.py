"""Calls that are judged while they are made: each reply is compared with the reply that the oracle's model predicts."""

from contextlib import suppress
from typing import Any

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.oracle.expectations import Expectation
from kvref_conformance.oracle.model_runner import ModelRunner


class CheckedSession:
    """Makes calls through a Subject, and judges each reply with a new ModelRunner."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.runner = ModelRunner(subject.level, subject.limits)
        self._expected: Expectation | None = None
        self._judged: Exchange | None = None
        subject.watchers.append(self._expect)
        subject.listeners.append(self._judge)

    def call(self, op: str, on: int | None, args: dict[str, Any]) -> Any:
        """Make a call (or the calls of its derivation) and judge it. Returns the result, or None if it raised a correct error.

        Raises ClauseViolation with the broken clause if the reply is wrong; NotOffered; UnknownObject if no model covers the
        call.
        """
        self._expected = self._judged = None
        try:
            return self.subject.call(op, on, args)
        except ClauseViolation as violation:
            violation.clause = violation.clause or (self._expected.clause if self._expected else "")
            raise
        except NotOffered:
            raise
        except Exception:
            if self._judged is None or self._judged is not self.subject.call_trace[-1]:
                raise  # an error in the judge itself
            return None

    def observe(self, number: int) -> None:
        """Read all observables of an object that are offered, and judge them. Raises ClauseViolation."""
        model = self.runner.models[number]
        for name, args in model.observations():
            with self.subject.quiet_reads(), suppress(NotOffered):
                self.call(f"{model.family}.{name}", number, args)

    def _expect(self, subject: Subject, exchange: Exchange) -> None:
        self._expected = self.runner.expect(exchange.request)

    def _judge(self, exchange: Exchange) -> None:
        assert self._expected is not None
        if self.subject.modified_argument:
            raise self.subject.modified_argument
        self.runner.judge(exchange, self._expected)
        self._judged = exchange
