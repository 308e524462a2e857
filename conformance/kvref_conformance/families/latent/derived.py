"""Derived operations of the latent cache."""

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.derived import Derived
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.oracle import records
from kvref_conformance.oracle.formats import PACKED, PLAIN
from kvref_conformance.oracle.latent import read_records
from kvref_conformance.outcome import NotOffered


def rows_of_records(cache: Handle) -> NDArray:
    config, dtype = cache.config, cache.config["dtype"]
    if dtype in PLAIN:
        raise NotOffered("read of a dtype without a record format (derived from records)")
    held = np.asarray(cache.records())
    return (
        read_records(held, config["rank"]) if dtype == PACKED else records.read(held, config["rank"] + config["rope_dim"], dtype)
    )


DERIVED = (
    Derived("length", "MLA-05", ("read",), lambda cache: len(cache.read())),
    Derived("read", "MLA-04", ("records",), rows_of_records),
    Derived("clear", "EDIT-01", ("truncate",), lambda cache: cache.truncate(0)),
)
