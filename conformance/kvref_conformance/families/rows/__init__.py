"""The family `rows`: quantizing rows of numbers, and reading them back."""

from math import isfinite

from kvref_conformance.families import Family

FAMILY = Family(
    name="rows",
    chapter="formats",
    fits=lambda config: config.get("given_scale") is None or (isfinite(config["given_scale"]) and config["given_scale"] > 0),
    encodes=True,
)
