"""Each operation once."""

from typing import Any

from kvref_conformance.checking.steps import Arguments, Got, Sizes, Steps, of, owned
from kvref_conformance.families.paged.steps import steps as steps_of_pages


def sequence(got: Got) -> Any:
    return got["prefix.begin"]


def steps(sizes: Sizes) -> Steps:
    """What a paged cache does, on a sequence that was begun; and before that is dropped, what only this one does."""
    pages = {name.partition(".")[2]: _renamed(arguments) for name, arguments in steps_of_pages(sizes).items()}
    drop = pages.pop("drop")
    committed = {"commit": of(sequence=sequence, tokens=[]), "match": of(tokens=[1, 2, 3])}
    begun = {"begin": of(tokens=[1, 2, 3])}
    return owned("prefix", begun | pages | committed | {"drop": drop, "reset": of()})


def _renamed(arguments: Arguments) -> Arguments:
    """For results that are known by this family's name."""
    return lambda got: arguments({f"paged{name.removeprefix('prefix')}": value for name, value in got.items()})
