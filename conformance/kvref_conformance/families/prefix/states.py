"""The states of the prefix cache that bugs hide behind."""

from kvref_conformance.searching.states import refusals

refusals("prefix", "TokenOutOfRange", "TokenMismatch", "InUse", "OutOfBlocks", "SequenceNotFound", "PositionOutOfRange")
