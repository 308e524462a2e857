"""Source locations in an implementation's code: "mine.py:12", or "" for kvref's own code."""

import os
import sysconfig
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any

KVREF_PACKAGES = {"kvref", "kvref_conformance", "kvref_torch", "kvref_cupy", "kvref_numpy"}


def raised_at(error: BaseException) -> str:
    """The last line of the traceback that is not kvref's. Lines of installed libraries count only if there are no others."""
    theirs = ""
    for frame, line in walk_tb(error.__traceback__):
        if not _is_ours(frame.f_globals):
            at = _format_location(frame.f_code.co_filename, line)
            if not theirs or not _is_library(frame.f_code.co_filename):
                theirs = at
    return theirs


def defined_at(function: Any) -> str:
    """The first line of a function or method that is not kvref's."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or _is_ours(getattr(function, "__globals__", {})):
        return ""
    return _format_location(code.co_filename, code.co_firstlineno)


def _is_ours(names: dict[str, Any]) -> bool:
    return str(names.get("__name__")).partition(".")[0] in KVREF_PACKAGES


def _format_location(file: str, line: int | None) -> str:
    return f"{_shorten_path(file, str(Path.cwd()))}:{line}"


@cache
def _shorten_path(file: str, folder: str) -> str:
    return os.path.relpath(file, folder) if Path(file).is_relative_to(folder) else file


@cache
def _is_library(file: str) -> bool:
    return any(Path(file).is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
