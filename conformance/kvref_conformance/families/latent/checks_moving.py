"""Checks of MOVE-01: rows are loaded byte for byte, packed ones too."""

import numpy as np

from kvref_conformance.checking.expect import same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import formats_of
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.latent.checks import filled, given
from kvref_conformance.oracle.formats import PACKED, PLAIN
from kvref_conformance.oracle.latent import TILE


@check("MOVE-01bc", "latent")
def rows_come_back_byte_for_byte(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN, PACKED):
        sizes = {"rank": 2 * TILE} if dtype == PACKED else {}
        cache, _ = filled(subject, 5, dtype=dtype, **sizes)
        loaded, _ = filled(subject, 3, dtype=dtype, **sizes)
        loaded.load(cache.save())
        same(
            np.asarray(loaded.records()),
            np.asarray(cache.records()),
            f"records of {dtype} rows after load, compared with the saved cache",
        )
        more = given(subject, cache, 2)
        for each in (cache, loaded):
            each.append(*more)
        same(loaded.read(), cache.read(), f"{dtype} rows after load and an append of 2, compared with the saved cache")
