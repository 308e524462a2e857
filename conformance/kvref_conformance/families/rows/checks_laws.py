"""LAW-16: what the laws say of this family alone."""

from kvref_conformance.checking.expect import same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject


@check("LAW-16", "rows")
def rows_are_left_alone(subject: Subject) -> None:
    subject.in_this_process()
    for name in subject.formats("int8", "float8_e4m3fn", "float8_e5m2", "q8", "q4"):
        rows = held(subject, subject.rng.normal(size=(3, subject.size("width", 5))))
        own = subject.own(rows)
        subject.new("rows").quantize(own, name)
        same(subject.numpy(own.array), rows, f"rows, after they were quantized to {name}")
