"""Checks of LAW-16 for this family."""

from kvref_conformance.checking.expect import same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.rows.checks import EVERY
from kvref_conformance.families.rows.handed import formats_of_rows, widths


@check("LAW-16", "rows")
def rows_are_left_alone(subject: Subject) -> None:
    subject.in_this_process()
    for name in formats_of_rows(subject, *EVERY):
        rows = held(subject, subject.rng.normal(size=(3, *widths(subject, 5, format=name))))
        own = subject.own(rows)
        subject.new("rows").quantize(own, name)
        same(subject.numpy(own.array), rows, f"the input rows after quantize to {name}")
