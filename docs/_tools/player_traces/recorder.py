"""Records calls to the reference, with notes for the reader, as a trace."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.trace import file
from kvref_conformance.implementations import load
from kvref_conformance.judging.judge import Judge
from kvref_conformance.oracle.witness import Unknown, Witness


class TraceRecorder:
    """Calls to the reference, and a note for some of them."""

    def __init__(self) -> None:
        self._judge = Judge(load("reference"))
        self._subject = self._judge.begin()
        self._notes: dict[int, str] = {}
        self._values = iter(range(1, 10_000))

    def note(self, text: str) -> None:
        """Add a note to the next call."""
        self._notes[len(self._subject.conversation) + 1] = text

    def new(self, family: str, **sizes: Any) -> Handle:
        return self._subject.new(family, **sizes)

    def tokens(self, *shape: int) -> np.ndarray:
        """Keys or values that are all different: 1, 2, 3 and so on."""
        return np.array([next(self._values) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)

    def record(self, script: Callable[["TraceRecorder"], None]) -> list[str]:
        """Run a script, and return the lines of its trace. The script's docstring is the title."""
        script(self)
        title = (script.__doc__ or "").strip()
        header = file.Header("any", title, "model", file.who(self._judge.implementation, "reference"))
        try:
            lines = file.written(header, Witness("exact"), self._subject.conversation)
        except Unknown:  # the trace contains numbers that no model defines
            lines = file.written(replace(header, judge="check"), Witness("exact"), self._subject.conversation)
        for id, note in self._notes.items():
            request = json.loads(lines[2 * id - 1])
            lines[2 * id - 1] = json.dumps(request | {"note": note})
        return lines
