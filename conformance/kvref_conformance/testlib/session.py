"""The session of a check: the calls that it makes, each judged by the family's model, and looks at what its objects contain.

A check calls the object of its `Session` as usual. The model predicts each reply, so that the check needs no copy of what the
object must contain. Let one check of each clause also compare with a value that it computes or states itself, because the model
could be wrong.
"""

from collections.abc import Callable
from typing import Any

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.oracle.model_runner import UnknownObject
from kvref_conformance.oracle.reference_model import ReferenceModel
from kvref_conformance.testlib.assertions import assert_equal
from kvref_conformance.testlib.fixtures import new_object
from kvref_conformance.traces.checked_session import CheckedSession

READS = ("gather", "read", "read_index", "read_tokens")
CONTENT_READS = ("length", "seq_len", "total_tokens", *READS)  # what `look` observes unless told otherwise


class JudgedCalls(CheckedSession):
    """Judges the calls of a subject. A wrong reply breaks the clause of the check, whichever clause the model names.

    A call that no model covers is not judged, nor are later calls of its object, because the model may have missed a change.
    uncovered: by object, the operation of such a call.
    """

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.uncovered: dict[int, str] = {}

    def call(self, op: str, on: int | None, args: dict[str, Any]) -> Any:
        try:
            return super().call(op, on, args)
        except ClauseViolation as violation:
            violation.clause = ""
            raise

    def _expect(self, subject: Subject, exchange: Exchange) -> None:
        self._expected = None
        request = exchange.request
        if request.on in self.uncovered:
            return
        try:
            super()._expect(subject, exchange)
        except UnknownObject as unknown:
            model = self.runner.models.get(request.on or 0)
            if hasattr(model, request.name) and not isinstance(unknown.__cause__, ValueError):
                raise  # a mistake in the model: it raises ValueError for calls that it does not cover
            if request.on is not None:
                self.uncovered[request.on] = request.op

    def _judge(self, exchange: Exchange) -> None:
        if self._expected is None:
            return
        try:
            self.runner.judge(exchange, self._expected)
        except ClauseViolation as violation:
            violation.clause = ""
            raise
        self._judged = exchange


class Session:
    """An object of the check's family, all calls of which are judged. A check may have several sessions."""

    def __init__(self, subject: Subject, make: Callable[[], ObjectProxy] | None = None, **changes: Any) -> None:
        """make: creates the object; the default is a small one of the family, with some sizes changed. Raises NotOffered."""
        self.subject = subject
        subject.judged = subject.judged or JudgedCalls(subject)
        self._runner = subject.judged.runner
        self.cache = make() if make else new_object(subject, subject.family, **changes)

    @property
    def model(self) -> ReferenceModel:
        model: ReferenceModel = self._runner.models[self.cache.id]
        return model

    def require_new_ids(self, create: Callable[[], Any]) -> None:
        """Create a sequence and drop it, three times. Raises ClauseViolation if two of them have the same id."""
        ids = list[int]()
        for _ in range(3):
            ids.append(int(create()))
            self.cache.drop(ids[-1])
        assert_equal(len(set(ids)), len(ids), f"number of different ids among {ids}")

    def look(self, *names: str) -> None:
        """Makes the calls that read lengths and contents, or the calls with these names. The model judges the replies.

        Raises ClauseViolation; NotOffered if the implementation provides none of them, or, by default, nothing that reads
        contents.
        """
        if op := self.subject.judged.uncovered.get(self.cache.id):
            raise NotOffered(f"contents that the model predicts, after a call of {op} that it does not cover")
        looks = [(name, args) for name, args in self.model.observations() if name in (names or CONTENT_READS)]
        required = {name for name, _ in looks} & set(names or READS)
        made, missing = set[str](), dict[str, NotOffered]()
        for name, args in looks:
            try:
                with self.subject.quiet_reads():
                    self.subject.judged.call(f"{self.model.family}.{name}", self.cache.id, args)
            except NotOffered as error:
                missing[name] = error
            else:
                made.add(name)
        if required and not required & made:
            raise missing[min(required)]
