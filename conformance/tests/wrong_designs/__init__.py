"""A gauntlet of wrong designs, written from the specification without knowledge of the judge's checks and of its planted bugs.

Each design is a patch of kvref on the NumPy backend that breaks one clause in a way in which an engineer could, with a proof that
it is wrong. GETS_THROUGH names the designs that `kvref check` does not notice at its defaults.
"""

from wrong_designs import dense_designs, format_designs, moving_designs, other_designs, paged_designs, prefix_designs
from wrong_designs.design import DESIGNS, Design, observe

__all__ = ["DESIGNS", "GETS_THROUGH", "Design", "observe"]

_MODULES = (dense_designs, format_designs, moving_designs, other_designs, paged_designs, prefix_designs)  # register designs

# By name of the design: why no check at defaults notices it.
GETS_THROUGH: dict[str, str] = {}
