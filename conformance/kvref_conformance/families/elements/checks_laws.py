"""Checks of LAW-14 for this family."""

import numpy as np

from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.outcome import Broken


@check("LAW-14", "elements")
def an_infinity_never_decodes_to_a_number(subject: Subject) -> None:
    elements = subject.new("elements")
    for name in subject.formats("float8_e4m3fn", "float8_e5m2"):
        special = np.array([np.nan, np.inf, -np.inf], np.float32)
        got = elements.decode(elements.encode(special, name), name)
        for value, back in zip(special, got, strict=True):
            if np.isfinite(back):
                raise Broken(f"{value} encoded and decoded in {name}", "a value that is not finite", repr(float(back)))
