"""Records calls to the reference, with notes for the reader, as a trace."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.implementations import load_implementation
from kvref_conformance.oracle.model_runner import ModelRunner, UnknownObject
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.traces import format


class TraceRecorder:
    """Calls to the reference, and a note for some of them."""

    def __init__(self) -> None:
        self._judge = CheckRunner(load_implementation("reference"))
        self._subject = self._judge.begin()
        self._notes: dict[int, str] = {}
        self._values = iter(range(1, 10_000))

    def note(self, text: str) -> None:
        """Add a note to the next call."""
        self._notes[len(self._subject.call_trace) + 1] = text

    def new(self, family: str, **sizes: Any) -> ObjectProxy:
        return self._subject.new(family, **sizes)

    def tokens(self, *shape: int) -> np.ndarray:
        """Keys or values that are all different: 1, 2, 3 and so on."""
        return np.array([next(self._values) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)

    def record(self, script: Callable[["TraceRecorder"], None]) -> list[str]:
        """Run a script, and return the lines of its trace. The script's docstring is the title."""
        script(self)
        title = (script.__doc__ or "").strip()
        header = format.Header("any", title, "model", format.describe_implementation(self._judge.implementation, "reference"))
        try:
            lines = format.trace_lines(header, ModelRunner("exact"), self._subject.call_trace)
        except UnknownObject:  # the trace contains numbers that no model defines
            lines = format.trace_lines(replace(header, judge="check"), ModelRunner("exact"), self._subject.call_trace)
        for id, note in self._notes.items():
            request = json.loads(lines[2 * id - 1])
            lines[2 * id - 1] = json.dumps(request | {"note": note})
        return lines
