"""A gauntlet of wrong designs, written from the specification without knowledge of the judge's checks and of its planted bugs.

Each design is a patch of kvref on the NumPy backend that breaks one clause in a way in which an engineer could, with a proof that
it is wrong. When they were written, `kvref check` noticed 64 of the 101 at its defaults; checks for the other 37 were then added.
"""

from wrong_designs import dense_designs, format_designs, moving_designs, other_designs, paged_designs, prefix_designs
from wrong_designs.design import DESIGNS, Design, observe

__all__ = ["DESIGNS", "Design", "observe"]

_MODULES = (dense_designs, format_designs, moving_designs, other_designs, paged_designs, prefix_designs)  # register designs
