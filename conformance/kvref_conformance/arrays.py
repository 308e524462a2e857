"""NumPy arrays as the judge uses them: of any dtype, since values, codes and bits go the same ways."""

from typing import Any, TypeAlias

import numpy.typing

NDArray: TypeAlias = numpy.typing.NDArray[Any]
