"""The family `prefix`: a paged cache that finds blocks of committed tokens."""

from kvref_conformance.families import Family
from kvref_conformance.families.paged import FAMILY as PAGES

FAMILY = Family(
    name="prefix",
    chapter="prefixes",
    small=PAGES.small,
    speaks_for=(
        *(clause for clause in PAGES.speaks_for if not clause.startswith("MOVE")),  # checks judge hits after load
        *(f"PREFIX-{n:02}" for n in range(1, 16)),
    ),
    gives={**PAGES.gives, "begin": "sequence"},
    several=PAGES.several,
    formats=PAGES.formats,
    fits=PAGES.fits,
    may_be_zero=PAGES.may_be_zero,
    appending=PAGES.appending,
    counted_as=PAGES.counted_as,
)
