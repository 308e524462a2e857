"""The number of groups in a row is rounded down: the numbers after the last whole group are not stored."""

from typing import Any

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def quantize(self, rows: Any, format: str) -> Any:
        group = kvref.get_format(format).group
        return super().quantize(rows[:, : rows.shape[1] // group * group] if group else rows, format)


class Implementation(Right):
    clause = "FMT-GROUP-03"
    bug = "vllm-project/vllm-ascend#9159"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
