"""The labs of the course "How a KV cache works": exercises that kvref checks itself. `kvref lab` starts and checks them.

A lab is a folder in `labs`, whose name begins with the number of the lab:

- lab.toml: its title, kind and lesson; for a cache also the family, the clauses that it has to satisfy, and its limits
- task.md: the task
- start.py, solution.py: the student's file at the beginning, and one that solves the lab
- hints.md: hints, one per heading, each more specific than the one before
- calls.py: only in labs of the kind "predict": calls of the reference, and questions about them (`quiz.ask`)

The code of a student is plain NumPy, and imports nothing from kvref but `kvref.errors`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent / "labs"

Kind = Literal["write", "fix", "predict"]


@dataclass(frozen=True)
class Lab:
    """One lab. lesson: the page in docs/how to which it belongs.

    A lab of the kind "predict" has no cache. In the others, factory is the name of the student's class, and clauses are the ids
    of the clauses that it has to satisfy, in the order in which they are checked. bug: the first of them that start.py breaks.
    limits: the sizes and formats that the class has to support, as in the attribute `limits` of an implementation.
    """

    folder: Path
    title: str
    kind: Kind
    lesson: str
    family: str = ""
    factory: str = "Cache"
    clauses: tuple[str, ...] = ()
    bug: str = ""
    formats: tuple[str, ...] = ("float32",)
    limits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def number(self) -> int:
        return int(self.name.partition("-")[0])

    @property
    def student_file(self) -> str:
        """The name of the file that the student edits."""
        return "answers.py" if self.kind == "predict" else "cache.py"

    @property
    def hints(self) -> list[str]:
        return [part.strip() for part in re.split(r"^## .*$", self.text("hints.md"), flags=re.MULTILINE)[1:]]

    def text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


@cache
def all_labs() -> tuple[Lab, ...]:
    """Return every lab, in the order of the course."""
    return tuple(_read_lab(path.parent) for path in sorted(FOLDER.glob("*/lab.toml")))


def find_lab(name: str) -> Lab:
    """Return the lab with a number ("3") or a name ("03-contiguous"). Raises KeyError."""
    for lab in all_labs():
        if name == lab.name or (name.isdecimal() and int(name) == lab.number):
            return lab
    raise KeyError(name)


def _read_lab(folder: Path) -> Lab:
    entries: dict[str, Any] = tomllib.loads((folder / "lab.toml").read_text(encoding="utf-8"))
    for name in {"clauses", "formats"} & entries.keys():
        entries[name] = tuple(entries[name])
    return Lab(folder, **entries)
