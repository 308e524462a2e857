"""The folder that a search keeps and the next one starts from.

`corpus.json` has the seeds that met something new, the failures, how far the numbers of seeds have come, and what each run came
to; `runs/` has the figures of each run over time, and `failures/` the traces. All is written while the search runs, each file as
a whole, and never left half written.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import kvref
from kvref_conformance.conversation.trace.file import TraceError, parsed
from kvref_conformance.conversation.trace.store import name_in_a_path
from kvref_conformance.exploring.seen import Shape
from kvref_conformance.exploring.units import KINDS, Unit, drawn
from kvref_conformance.outcome import CannotRun

VERSION = 1
FOLDER = Path(".kvref/search")


@dataclass
class Known:
    """A failure. times: how often it was met. trace: its file in the folder; empty where it could not be made shorter in time."""

    clause: str
    shape: Shape
    unit: Unit
    times: int = 1
    trace: str = ""


@dataclass
class Point:
    """How far a run had come after so many seconds. families: by name, states and transitions."""

    seconds: float
    units: int
    calls: int
    states: int
    transitions: int
    failures: int
    families: dict[str, list[int]]


@dataclass
class Run:
    """began: the time of day. points: its figures over time; lost: units that no worker lived to do."""

    began: str
    seed: int
    workers: int
    points: list[Point] = field(default_factory=list)
    lost: int = 0
    mended: list[str] = field(default_factory=list)


@dataclass
class Corpus:
    folder: Path
    name: str
    seeds: list[Unit] = field(default_factory=list)
    failures: list[Known] = field(default_factory=list)
    handed: dict[str, int] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "corpus.json"

    def trace(self, known: Known) -> list[str]:
        """The lines of its trace; none where there is none. Raises TraceError where it cannot be read, or was cut short."""
        if not known.trace:
            return []
        path = self.folder / "failures" / known.trace
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: {_said(error)}") from None
        read = parsed(path, lines)
        if read.header.judge == "model" and not any("got" in reply for reply in read.replies):
            raise TraceError(f"{path}: it ends before anything breaks")
        return lines

    def write(self) -> None:
        """Raises OSError."""
        failures, ends = map(asdict, self.failures), [asdict(replace(run, points=run.points[-1:])) for run in self.runs]
        said = {"corpus": VERSION, "kvref": kvref.__version__, "name": self.name, "seeds": self.seeds, "failures": list(failures)}
        _write(self.path, {**said, "handed": self.handed, "runs": ends})
        if self.runs:
            _write(self.folder / "runs" / f"{len(self.runs):04}.json", asdict(self.runs[-1]))


def _write(path: Path, said: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def folder_of(name: str) -> Path:
    return FOLDER / name_in_a_path(name)


def open_corpus(folder: Path, name: str) -> Corpus:
    """What lies in a folder, or nothing yet. Raises CannotRun where it is no corpus, or another implementation's."""
    found = Corpus(folder, name)
    if folder.exists() and not folder.is_dir():
        raise CannotRun(f"--corpus: expected a folder, got the file {folder}")
    if not found.path.exists():
        if folder.exists() and any(folder.iterdir()):
            raise CannotRun(f"--corpus: expected a new folder, an empty one or a corpus, got {folder}, which has no corpus.json")
        return found
    try:
        said = json.loads(found.path.read_text(encoding="utf-8"))
        if said["corpus"] != VERSION:
            raise ValueError(f"expected version {VERSION}, got {said['corpus']!r}")
        found.seeds = [_unit(each) for each in said["seeds"]]
        found.failures = [_known(each) for each in said["failures"]]
        found.handed = {str(kind): int(count) for kind, count in said["handed"].items()}
        found.runs = [Run(**each | {"points": [Point(**point) for point in each["points"]]}) for each in said["runs"]]
        whose = said["name"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CannotRun(f"--corpus: {found.path} cannot be read: {_said(error)}") from None
    if whose != name:
        raise CannotRun(f"--corpus: {folder} is of {whose}, expected one of {name}")
    return found


def _known(said: dict[str, Any]) -> Known:
    trace = str(said["trace"])
    if Path(trace).name != trace:
        raise ValueError(f"expected the name of a file, got {trace!r}")
    return Known(str(said["clause"]), tuple(map(str, said["shape"])), _unit(said["unit"]), int(said["times"]), trace)


def _unit(said: list[str]) -> Unit:
    family, kind, seed = said
    if kind not in KINDS:
        raise ValueError(f"expected one of {', '.join(KINDS)}, got {kind!r}")
    drawn(seed)  # which raises ValueError
    return Unit(family, kind, seed)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
