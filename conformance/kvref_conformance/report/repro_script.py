"""Generates the draft of a script that shows a failure with a library alone: the calls that an adapter made during a replay.

It records calls of Python functions from code in the adapter's folder. It does not record attribute accesses and calls of C
extensions, so the script must be completed by hand.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.exceptions import printable
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.replay import TraceReplay, replay_saved_trace
from kvref_conformance.traces.format import Trace

MAX_ARRAY_VALUES = 64  # a larger array is replaced by zeros of its shape
ARRAY_FUNCTIONS = {
    "torch": "torch.tensor",
    "mlx": "mx.array",
    "jax": "jnp.array",
    "jaxlib": "jnp.array",
}  # by library; else np.array
IMPORTS = {"torch": "import torch", "mx": "import mlx.core as mx", "jnp": "import jax.numpy as jnp", "np": "import numpy as np"}

CALL_MARK = "asked"  # a placeholder line for a call of the judge


@dataclass
class ScriptLine:
    """A line of the script. target: the name of its result."""

    text: str
    target: str = ""


class LibraryCallRecorder:
    """Records the calls of an adapter between `sys.setprofile(recorder)` and `sys.setprofile(None)`."""

    def __init__(self, implementation: Any) -> None:
        self._to_numpy = implementation.to_numpy
        kinds = [kind for kind in type(implementation).__mro__ if kind.__module__ != "builtins"]
        self._adapters = {str(Path(inspect.getfile(kind)).parent) for kind in kinds}
        self._known: list[tuple[Any, str]] = []  # objects with a name in the script; the reference keeps their identity unique
        self._imports = dict[str, None]()
        self._lines: list[ScriptLine] = []
        self._open: dict[FrameType, ScriptLine] = {}
        self._quiet = False  # whether the current call of the judge is quiet

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        if event == "call" and not self._quiet and self._is_library_call(frame):
            line = self._open[frame] = ScriptLine(self._format_call(frame))
            self._lines.append(line)
        elif event == "return" and frame in self._open:
            line = self._open.pop(frame)
            made = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else result
            if made is not None and not isinstance(made, bool | int | float | str) and not self._name_of(made):
                line.target = f"_{len(self._known)}"
                self._known.append((made, line.target))

    def note_judge_call(self, subject: object, exchange: Exchange) -> None:
        """Note a call of the judge. The library calls that follow belong to it."""
        self._quiet = exchange.quiet
        if not exchange.quiet:
            self._lines.append(ScriptLine(CALL_MARK))

    def script(self, replay: TraceReplay) -> str:
        """The script. replay: the result of the replay, whose calls become comments."""
        calls = iter(replay.calls)
        used = {name for line in self._lines for name in re.findall(r"\b_\d+\b", line.text)}
        texts = [
            f"# {printable(next(calls), keep_lines=False)}"
            if line.text is CALL_MARK
            else f"{line.target} = {line.text}"
            if line.target in used
            else line.text
            for line in self._lines
        ]
        imports = [*self._imports, *(text for name, text in IMPORTS.items() if any(f"{name}." in line for line in texts))]
        parted = [
            f"# {printable(said, keep_lines=False)}"
            for said in (replay.what, f"expected {replay.expected}", f"got      {replay.got}")
        ]
        if all(line.text is CALL_MARK for line in self._lines):
            imports = ["# The adapter called no library: the code under test is in its own folder. The calls of the judge:"]
        return "\n".join([*imports, "", *texts, *(parted if replay.mismatch_line else []), ""])

    def _is_library_call(self, frame: FrameType) -> bool:
        """Whether the frame is a call of a library function from the adapter's own code."""
        caller, code = frame.f_back, frame.f_code
        if caller is None or code.co_name in ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<module>"):
            return False
        ours = str(Path(caller.f_code.co_filename).parent) in self._adapters
        return ours and str(Path(code.co_filename).parent) not in self._adapters and not _is_pythons_own(code)

    def _format_call(self, frame: FrameType) -> str:
        """The call as Python code. If that fails, only its name: an error in this hook would be raised in the adapter."""
        try:
            return self._call(frame)
        except Exception:
            return f"...  # {frame.f_code.co_qualname}"

    def _call(self, frame: FrameType) -> str:
        code, given = frame.f_code, frame.f_locals
        names = list(code.co_varnames[: code.co_argcount])
        if code.co_name == "__init__":
            self._import(type(given[names[0]]))
            return f"{type(given[names[0]]).__name__}({self._arguments(frame, names[1:])})"
        owner = given.get(names[0]) if names and names[0] in ("self", "cls") else None
        if owner is None:
            self._imports[f"from {frame.f_globals['__name__']} import {code.co_name}"] = None
            return f"{code.co_name}({self._arguments(frame, names)})"
        if isinstance(owner, type):
            self._import(owner)
        of = owner.__name__ if isinstance(owner, type) else self._name_of(owner) or f"...<{type(owner).__name__}>"
        if isinstance(inspect.getattr_static(owner, code.co_name, None), property):
            return f"{of}.{code.co_name}"
        return f"{of}.{code.co_name}({self._arguments(frame, names[1:])})"

    def _arguments(self, frame: FrameType, names: list[str]) -> str:
        every, rest, keywords, given = inspect.getargvalues(frame)
        positional = every[: frame.f_code.co_argcount]
        if rest and given[rest]:  # with *args, the arguments before them must be positional
            words = [*(self._value(given[name]) for name in positional if name in names), f"*{self._value(given[rest])}"]
        else:
            words = [
                f"{name}={self._value(given[name])}" for name in positional if name in names and self._is_written(frame, name)
            ]
        words += [
            f"{name}={self._value(given[name])}" for name in every if name not in positional and self._is_written(frame, name)
        ]
        return ", ".join([*words, *(f"{name}={self._value(value)}" for name, value in given.get(keywords or "", {}).items())])

    def _is_written(self, frame: FrameType, name: str) -> bool:
        """Whether an argument must be written: it differs from its default."""
        value, default = frame.f_locals[name], _defaults_of(frame).get(name, inspect.Parameter.empty)
        plain = isinstance(value, bool | int | float | str) and type(value) is type(default)
        return value is not default and not (plain and value == default)

    def _value(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | str | slice):
            return repr(value)
        if name := self._name_of(value):
            return name
        if isinstance(value, list | tuple):
            inside = ", ".join(self._value(each) for each in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._value(each)}' for key, each in value.items())}}}"
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return self._array(value)
        if isinstance(value, type):
            self._import(value)
            return value.__name__
        said = repr(value)
        return said if re.fullmatch(r"[\w.]+", said) else f"...<{type(value).__name__}>"

    def _array(self, value: Any) -> str:
        maker = ARRAY_FUNCTIONS.get(type(value).__module__.partition(".")[0], "np.array")
        numbers = np.asarray(self._to_numpy(value))
        if numbers.size > MAX_ARRAY_VALUES:
            return f"{maker}(np.zeros({list(numbers.shape)}, {str(numbers.dtype)!r}))"  # the numbers are in the trace
        return f"{maker}({numbers.tolist()})"

    def _name_of(self, value: Any) -> str:
        """The name of an object in the script: a result, or an attribute of a result; "" if it has none."""
        for known, name in self._known:
            if known is value:
                return name
        for known, name in self._known:
            for attribute, inside in getattr(known, "__dict__", {}).items():
                if inside is value:
                    return f"{name}.{attribute}"
                for at, each in enumerate(inside if isinstance(inside, list | tuple) else ()):
                    if each is value:
                        return f"{name}.{attribute}[{at}]"
        return ""

    def _import(self, kind: type) -> None:
        self._imports[f"from {kind.__module__} import {kind.__qualname__}"] = None


def _is_pythons_own(code: CodeType) -> bool:
    return code.co_filename.startswith("<") or Path(code.co_filename).parent == Path(re.__file__).parents[1]


def _defaults_of(frame: FrameType) -> dict[str, Any]:
    """The defaults of the function that a frame runs; empty if the function is not found."""
    for function in _functions_of(frame):
        try:
            return {name: each.default for name, each in inspect.signature(function).parameters.items()}
        except (TypeError, ValueError):
            continue
    return {}


def _functions_of(frame: FrameType) -> Iterator[Callable[..., Any]]:
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    for holder in [*type(owner).__mro__, frame.f_globals] if owner is not None else [frame.f_globals]:
        found = holder.get(name) if isinstance(holder, dict) else vars(holder).get(name)
        if inspect.isfunction(found) and found.__code__ is frame.f_code:
            yield found


def make_script(trace: Trace, judge: CheckRunner) -> str:
    """Replay a trace and return the script. Raises the same errors as `replay_saved_trace`."""
    recorder = LibraryCallRecorder(judge.implementation)
    judge.watchers.append(recorder.note_judge_call)
    sys.setprofile(recorder)
    try:
        replay = replay_saved_trace(trace, judge)
    finally:
        sys.setprofile(None)
        judge.watchers.remove(recorder.note_judge_call)
    return recorder.script(replay)
