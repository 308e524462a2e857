"""Bugs to plant in the reference, one module per chapter. Many are real: see the *differs from* and *would have caught* lines.

Each bug replaces a method or some words of the reference while a test runs (`bugs.plant`). `test_planted_bugs.py` checks that
its clause fails. This reaches the inside of every operation, so that each clause has a bug. The zoo (`kvref_zoo`) contains bugs
for users: complete wrong caches with names, most of them modelled on public reports. If a subclass of a few lines can show a
bug, add it to the zoo. The random changes of mutmut (`nox -s mutation`, counted by `mutants.py`) are made without a clause in
mind.
"""

from importlib import import_module
from pkgutil import iter_modules

from bugs.plant import BUGS, DEFERRED, HIDDEN, REAL

for module in iter_modules(__path__, "bugs."):
    import_module(module.name)

__all__ = ["BUGS", "DEFERRED", "HIDDEN", "REAL"]
