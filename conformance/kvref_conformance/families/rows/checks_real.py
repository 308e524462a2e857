"""Checks of LAW-18: rows as long as all heads of a token together, and as many rows as the tokens of a prompt."""

from kvref_conformance.checking.expect import same, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.rows.checks import EVERY, quantized, same_codes, same_scale
from kvref_conformance.families.rows.handed import formats_of_rows, widths
from kvref_conformance.oracle import rows as oracle
from kvref_conformance.oracle.formats import GROUPS


def judged(subject: Subject, count: int, wanted: int) -> None:
    """Checks every format at the allowed width nearest to `wanted`. The largest number of each row is its last."""
    for name in formats_of_rows(subject, *EVERY):
        (width,) = widths(subject, wanted, format=name)
        rows = held(subject, subject.rng.normal(size=(count, width)))
        rows[:, -1] = 7
        got, want = quantized(subject, rows, name), oracle.store(rows, name)
        same_scale(subject, got.scale, want.scale, f"{name} scales of {count} rows of {width}", name)
        same_codes(subject, got.codes, rows, name, got if name in GROUPS else None)
        if subject.level == "exact":
            same(got.values, want.values, f"{name} values of {count} rows of {width}")
        else:
            within(
                got.values,
                rows,
                oracle.bounds(rows, oracle.with_scales(rows, got, name), name)[1],
                f"{name} values of {count} rows of {width}",
            )


@check("LAW-18", "rows")
def rows_are_quantized_to_their_end(subject: Subject) -> None:
    for width in (1023, 1025, 4096, 8193):
        judged(subject, 2, width)


@check("LAW-18", "rows")
def thousands_of_rows_are_quantized(subject: Subject) -> None:
    for count in (1025, 4097):
        judged(subject, count, 16)


@check("LAW-18", "rows", real=True)
def rows_are_as_long_and_as_many_as_models_have_them(subject: Subject) -> None:
    judged(subject, 3, 70_001)
    judged(subject, 70_001, 8)
