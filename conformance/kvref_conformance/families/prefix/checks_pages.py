"""PAGED, SHARE, EDIT: a prefix cache does what a paged one does, and each check of that asks it too; but those of real sizes."""

from kvref_conformance.checking.registry import asked_of

asked_of("prefix", "paged", but=("LAW-18",))
