"""One call of each operation, for the self-test of a harness."""

from typing import Any

from kvref_conformance.checking.steps import Arguments, Got, Sizes, Steps, of, owned
from kvref_conformance.families.paged.steps import steps as steps_of_pages


def sequence(got: Got) -> Any:
    return got["prefix.begin"]


def steps(sizes: Sizes) -> Steps:
    """Returns the steps of this family, and those of the paged cache on a sequence created by begin."""
    pages = {name.partition(".")[2]: _renamed(arguments) for name, arguments in steps_of_pages(sizes).items()}
    drop = pages.pop("drop")
    committed = {"commit": of(sequence=sequence, tokens=[]), "match": of(tokens=[1, 2, 3])}
    begun = {"begin": of(tokens=[1, 2, 3])}
    return owned("prefix", {"reset": of()} | begun | pages | committed | {"drop": drop})


def _renamed(arguments: Arguments) -> Arguments:
    """Returns `arguments` for results that are stored under the name of this family."""
    return lambda got: arguments({f"paged{name.removeprefix('prefix')}": value for name, value in got.items()})
