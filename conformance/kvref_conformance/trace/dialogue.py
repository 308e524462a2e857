"""A conversation judged as it is held: each reply by what the oracle's model says it must be."""

from typing import Any

from kvref_conformance.drivers.in_process import Subject
from kvref_conformance.exchange import Exchange
from kvref_conformance.oracle.expected import Expected
from kvref_conformance.oracle.witness import Witness
from kvref_conformance.outcome import Broken, NotOffered


class Dialogue:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.witness = Witness(subject.level)
        self._expected: Expected | None = None
        subject.watchers.append(self._expect)

    def say(self, op: str, on: int | None, args: dict[str, Any]) -> Any:
        """Make a call. Gives the result, or None where it raised as it had to.

        Raises Broken, with its clause, where it did not do as it must; NotOffered; Unknown where no model speaks for it.
        """
        result, self._expected = None, None
        try:
            result = self.subject.call(op, on, args)
        except Broken as broken:
            broken.clause = broken.clause or (self._expected.clause if self._expected else "")
            raise
        except NotOffered:
            raise
        except Exception:
            if self.subject.conversation[-1].reply is None or self._expected is None:
                raise  # the judge's own
        assert self._expected is not None
        if self.subject.changed:
            raise self.subject.changed
        self.witness.judge(self.subject.conversation[-1], self._expected)
        return result

    def _expect(self, subject: Subject, exchange: Exchange) -> None:
        self._expected = self.witness.expect(exchange.request)
