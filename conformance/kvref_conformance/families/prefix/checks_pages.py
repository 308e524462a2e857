"""Registers the checks of the paged cache for prefix caches too, except those of LAW-18."""

from kvref_conformance.checking.registry import asked_of

asked_of("prefix", "paged", but=("LAW-18",))
