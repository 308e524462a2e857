"""Checks of FMT-STATIC: a paged cache with a given scale for keys and one for values."""

import numpy as np

from kvref_conformance.checking.expect import raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import formats_of, new, takes
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.checks_formats import KEY_SCALE, VALUE_SCALE
from kvref_conformance.families.paged.counting import with_room
from kvref_conformance.families.paged.known import Known
from kvref_conformance.oracle.formats import STATIC

LOUD = np.float32(2.0**6)  # larger than a scale computed from earlier tokens could represent


class Louder(Known):
    """A cache in which the values of each write are larger than before, until they are clipped."""

    loud = np.float32(1)

    def given(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = super().given(count)
        self.loud = min(self.loud * 4, LOUD) if count else self.loud
        return keys * self.loud, values * self.loud


@check("FMT-STATIC-06ab", "paged")
def pages_hold_keys_and_values_by_the_scale_that_is_theirs(subject: Subject) -> None:
    for name in formats_of(subject, "dtype", *STATIC):
        for given in (
            {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE},
            {"key_scale": KEY_SCALE},
            {"value_scale": VALUE_SCALE},
            {},
        ):
            cache = Louder(subject, with_room(subject, 8, dtype=name, num_layers=1, **given))
            sequence = cache.create(cache.size + 1)
            cache.write(sequence, 0, cache.size, 2)
            cache.look(f"in {name} with scales {given or 'not given'}")


@check("FMT-STATIC-05ab", "paged")
def pages_of_a_scale_that_is_none_are_refused(subject: Subject) -> None:
    for name in formats_of(subject, "dtype", *STATIC):
        config = new(subject, subject.family, dtype=name).config
        others = [other for other in ("int8", "float32") if takes(subject, "dtype", other)]
        wrong = [(name, scale) for scale in (0.0, -0.5, *(() if subject.by_value else (float("nan"), float("inf"))))]
        for dtype, scale in (*wrong, *((other, 0.5) for other in others)):
            for which in ("key_scale", "value_scale"):
                with raises("ConfigError"):
                    subject.new(subject.family, **config | {"dtype": dtype, which: scale})
