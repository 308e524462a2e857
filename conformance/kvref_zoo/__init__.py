"""Caches that are wrong on purpose: each a few lines on top of a right one, each modelled on a bug that somebody shipped.

They show that the judge sees what it says it sees: each names the clause that must catch it (`kvref zoo`), and none gets through.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from kvref_zoo.right import Right


def names() -> list[str]:
    """The members, as `kvref check` knows them without the `zoo:` before."""
    return sorted(module.name.replace("_", "-") for module in iter_modules(__path__) if module.name != "right")


def member(name: str) -> Right:
    """Raises KeyError, also for a name that is not one."""
    if name not in names():
        raise KeyError(name)
    found: Right = import_module(f"kvref_zoo.{name.replace('-', '_')}").Implementation()
    return found


def story(name: str) -> str:
    """What goes wrong, in a sentence."""
    return (import_module(f"kvref_zoo.{name.replace('-', '_')}").__doc__ or "").strip()


def members() -> Iterator[Right]:
    yield from map(member, names())
