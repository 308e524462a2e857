"""Derived operations of the latent cache."""

import numpy as np

from kvref_conformance.calls.derived_operations import DerivedOperation
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PACKED_FORMAT, PLAIN_FORMATS, packed_records
from kvref_conformance.oracle.formats.mla import read_records


def rows_of_records(cache: ObjectProxy) -> NDArray:
    config, dtype = cache.config, cache.config["dtype"]
    if dtype in PLAIN_FORMATS:
        raise NotOffered("read of a dtype without a record format (derived from records)")
    records = np.asarray(cache.records())
    return (
        read_records(records, config["rank"])
        if dtype == PACKED_FORMAT
        else packed_records.read(records, config["rank"] + config["rope_dim"], dtype)
    )


DERIVED = (
    DerivedOperation("length", "MLA-05", ("read",), lambda cache: len(cache.read())),
    DerivedOperation("read", "MLA-04", ("records",), rows_of_records),
    DerivedOperation("clear", "EDIT-01", ("truncate",), lambda cache: cache.truncate(0)),
)
