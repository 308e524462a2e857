"""One call of each operation."""

from kvref_conformance.checking.steps import Sizes, Steps, of, owned


def steps(sizes: Sizes) -> Steps:
    key = [3]
    return owned("offload", {
        "capacity": of(), "num_free": of(), "prepare_store": of(keys=key), "complete_store": of(keys=key), "lookup": of(keys=key),
        "places": of(keys=key), "touch": of(keys=key), "prepare_load": of(keys=key), "complete_load": of(keys=key),
    })  # fmt: skip
