"""The corpus: the folder in which a search stores its results, and from which the next search continues.

`corpus.json` contains the seeds that reached something new, the failures, the numbers of scheduled units, and the last point of
each run; `runs/` contains all points of each run, `failures/` the traces. The files are written while the search runs. Each is
replaced as a whole, so that no file is ever incomplete.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import kvref
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.fuzz.work_unit import KINDS, Kind, WorkUnit, seed_bytes
from kvref_conformance.traces.format import TraceError, parse_trace
from kvref_conformance.traces.paths import implementation_path_name
from kvref_conformance.traces.shape import Shape

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

VERSION = 1
SEARCH_FOLDER = Path(".kvref/search")
CORPUS_FILES = "corpus.lock", "corpus.new"  # a folder with only these files counts as empty
MAX_LIST_LENGTH = 200  # maximum characters of an error message about a file


@dataclass
class KnownFailure:
    """A failure. times: how often it was found. trace: the name of its file, "" if it could not be shrunk in time."""

    clause: str
    shape: Shape
    unit: WorkUnit
    times: int = 1
    trace: str = ""


@dataclass
class ProgressPoint:
    """The numbers of a run after `seconds`. families: the numbers of states and transitions by family."""

    seconds: float
    units: int
    calls: int
    states: int
    transitions: int
    failures: int
    families: dict[str, list[int]]


@dataclass
class CampaignRun:
    """One run. began: its date and time. lost: number of units that were lost because a worker ended.

    mended: clauses of earlier failures that no longer occur.
    """

    began: str
    seed: int
    workers: int
    points: list[ProgressPoint] = field(default_factory=list)
    lost: int = 0
    mended: list[str] = field(default_factory=list)


@dataclass
class Corpus:
    """The content of a corpus. name: of the implementation. handed: see SeedScheduler."""

    folder: Path
    name: str
    seeds: list[WorkUnit] = field(default_factory=list)
    failures: list[KnownFailure] = field(default_factory=list)
    handed: dict[str, int] = field(default_factory=dict)
    runs: list[CampaignRun] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "corpus.json"

    def trace(self, known: KnownFailure) -> list[str]:
        """The lines of the failure's trace; empty if it has none. Raises TraceError if it cannot be read or is cut off."""
        if not known.trace:
            return []
        path = self.folder / "failures" / known.trace
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise TraceError(f"{path}: {_error_text(error)}") from None
        read = parse_trace(path, lines)
        if read.header.judge == "model" and not any("got" in reply for reply in read.replies):
            raise TraceError(f"{path}: contains no wrong reply")
        return lines

    def write(self) -> None:
        """Write all files. Raises OSError."""
        failures, ends = map(asdict, self.failures), [asdict(replace(run, points=run.points[-1:])) for run in self.runs]
        said = {"corpus": VERSION, "kvref": kvref.__version__, "name": self.name, "seeds": self.seeds, "failures": list(failures)}
        _write_json(self.path, {**said, "handed": self.handed, "runs": ends})
        if self.runs:
            _write_json(self.folder / "runs" / f"{len(self.runs):04}.json", asdict(self.runs[-1]))


def _write_json(path: Path, said: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


@contextmanager
def lock_corpus(folder: Path) -> Iterator[None]:
    """Lock the folder while the block runs. Raises CannotRun if another search has locked it, or if it is not a folder.

    The operating system releases the lock when the process ends. On systems or file systems without locks, nothing is locked.
    """
    if folder.exists() and not folder.is_dir():
        raise CannotRun(f"--corpus: expected a folder, got the file {folder}")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "corpus.lock").open("a") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CannotRun(f"--corpus: {folder}: in use by another search") from None
            except OSError:
                pass  # a network file system without locks
        try:
            yield
        finally:
            if not (folder / "corpus.json").exists():  # the search did not start: remove what was created here
                (folder / "corpus.lock").unlink(missing_ok=True)
                with suppress(OSError):
                    for each in made:
                        each.rmdir()


def default_corpus_folder(name: str) -> Path:
    """The default folder of the corpus of an implementation."""
    return SEARCH_FOLDER / implementation_path_name(name)


def open_corpus(folder: Path, name: str) -> Corpus:
    """Read the corpus in a folder, or make an empty one. Call it inside `lock_corpus`.

    Raises CannotRun if the folder contains something else, or the corpus of another implementation.
    """
    found = Corpus(folder, name)
    if not found.path.exists():
        if folder.exists() and any(each.name not in CORPUS_FILES for each in folder.iterdir()):
            raise CannotRun(f"--corpus: expected a new folder, an empty one or a corpus, got {folder}, which has no corpus.json")
        return found
    try:
        said = json.loads(found.path.read_text(encoding="utf-8"))
        if said["corpus"] != VERSION:
            raise ValueError(f"expected version {VERSION}, got {said['corpus']!r}")
        found.seeds = [*map(_parse_unit, _parse_list(said["seeds"]))]
        found.failures = [*map(_parse_failure, _parse_list(said["failures"]))]
        found.handed = {_parse_text(kind): _parse_count(count) for kind, count in said["handed"].items()}
        found.runs = [*map(_parse_run, _parse_list(said["runs"]))]
        whose = _parse_text(said["name"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CannotRun(f"--corpus: {found.path} cannot be read: {_error_text(error)}") from None
    if whose != name:
        raise CannotRun(f"--corpus: expected the corpus of {name}, got that of {whose} in {folder}")
    return found


def _parse_failure(said: Any) -> KnownFailure:
    trace = _parse_text(said["trace"])
    if trace != Path(trace).name or trace == ".." or "\0" in trace:
        raise ValueError(f"expected a file name, got {trace!r}")
    shape = tuple(map(_parse_text, _parse_list(said["shape"])))
    return KnownFailure(_parse_text(said["clause"]), shape, _parse_unit(said["unit"]), _parse_count(said["times"]), trace)


def _parse_run(said: Any) -> CampaignRun:
    """A run with only its last point."""
    numbers = {name: _parse_count(said[name]) for name in ("seed", "workers", "lost")}
    points = [_parse_point(each) for each in _parse_list(said["points"])]
    if not points:
        raise ValueError("expected points of a run, got none")
    return CampaignRun(
        _parse_text(said["began"]), points=points, mended=[*map(_parse_text, _parse_list(said["mended"]))], **numbers
    )


def _parse_point(said: Any) -> ProgressPoint:
    seconds = said["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"expected seconds, got {seconds!r}")
    numbers = {name: _parse_count(said[name]) for name in ("units", "calls", "states", "transitions", "failures")}
    families = {_parse_text(name): [*map(_parse_count, _parse_list(met))] for name, met in said["families"].items()}
    return ProgressPoint(float(seconds), families=families, **numbers)


def _parse_unit(said: Any) -> WorkUnit:
    family, kind, seed = map(_parse_text, _parse_list(said))
    if kind == "calls":
        seed_bytes(seed)  # raises ValueError
    elif kind not in KINDS:
        raise ValueError(f"expected one of {', '.join(KINDS)}, got {kind!r}")
    elif not (seed.isascii() and seed.isdigit() and int(seed) >= 0):
        raise ValueError(f"expected a number, got {seed!r}")
    return WorkUnit(family, cast(Kind, kind), seed)


def _parse_list(said: Any) -> list[Any]:
    if not isinstance(said, list):
        raise ValueError(f"expected a list, got {said!r}")
    return said


def _parse_text(said: Any) -> str:
    if not isinstance(said, str):
        raise ValueError(f"expected text, got {said!r}")
    said.encode()  # raises ValueError for a lone surrogate
    return said


def _parse_count(said: Any) -> int:
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        raise ValueError(f"expected a non-negative integer, got {said!r}")
    return said


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_LIST_LENGTH]}"
