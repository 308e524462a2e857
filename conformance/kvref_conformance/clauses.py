"""The parser of the specification: reads clauses from the chapters in kvref/spec.

A chapter is a Markdown file: `# Title (CODE)`, an introduction, then clauses. A clause is `## ID · Title`, its normative text
(MUST, SHOULD or MAY), a `*Why.*` paragraph and an example with `>>>`. It may have `*Differs from.*` and `*Would have caught.*`
paragraphs. If a file deviates from this form, `read_spec` raises SpecError with the file and line, and no check runs.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import ascii_lowercase

CHAPTERS = (
    "laws", "formats", "contiguous", "blocks", "paged", "sharing", "prefixes", "windows", "groups", "quantized", "channels",
    "tiered", "edits", "moving", "buffers", "pooled", "latents", "sharded", "transfer", "recurrent", "pruned", "ragged", "cross",
    "sparse", "compressed", "tree", "attention", "kernels", "engines",
)  # fmt: skip

_CHAPTER = re.compile(r"# (?P<title>.+) \((?P<code>[A-Z]+)\)")
_CLAUSE = re.compile(r"## (?P<id>[A-Z]+(-[A-Z0-9]+)?-\d\d) · (?P<title>\S.*)")
_LETTER = re.compile(r"^- \(([a-z])\) ", re.MULTILINE)
_BUG = re.compile(r"[\w.-]+/[\w.-]+#\d+")


class SpecError(Exception):
    """A chapter is malformed. The message names the file, the line and the problem."""


@dataclass(frozen=True)
class Clause:
    id: str
    title: str
    chapter: str  # the code of its chapter: LAW, FMT, ...
    text: str  # the normative text
    why: str
    example: str
    differs: str  # "Differs from": other projects that behave differently, or ""
    caught: str  # "Would have caught": public bugs, or ""
    path: Path
    line: int

    @property
    def letters(self) -> str:
        """The letters of its requirements: "abc" for a list "- (a) ...", "- (b) ...", "- (c) ..."; "" without such a list."""
        return "".join(_LETTER.findall(self.text))

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with the words of the normative text, but not with its line breaks."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()[:8]

    @property
    def bugs(self) -> list[str]:
        """The public bugs that the clause would have caught, as owner/repo#number."""
        return _BUG.findall(self.caught)


@dataclass(frozen=True)
class Chapter:
    code: str
    title: str
    intro: str
    clauses: tuple[Clause, ...]


def read_chapter(path: Path) -> Chapter:
    """Parse one chapter. Raises SpecError."""
    lines = path.read_text(encoding="utf-8").splitlines()
    heading = _CHAPTER.fullmatch(lines[0]) if lines else None
    if not heading:
        raise SpecError(f"{path.name}:1: expected '# Title (CODE)', got {lines[0] if lines else 'an empty file'!r}")
    starts = [number for number, line in enumerate(lines) if line.startswith("## ")]
    ends = [*starts[1:], len(lines)]
    clauses = [_read_clause(path, heading["code"], start, lines[start:end]) for start, end in zip(starts, ends, strict=True)]
    intro = "\n".join(lines[1 : starts[0] if starts else None]).strip()
    return Chapter(heading["code"], heading["title"], intro, tuple(clauses))


def _read_clause(path: Path, code: str, start: int, lines: list[str]) -> Clause:
    where = f"{path.name}:{start + 1}"
    heading = _CLAUSE.fullmatch(lines[0])
    if not heading or not heading["id"].startswith(f"{code}-"):
        raise SpecError(f"{where}: expected '## {code}-NN · Title', got {lines[0]!r}")
    body = "\n".join(lines[1:])
    examples = re.findall(r"```python\n(.*?)```", body, flags=re.DOTALL)
    parts: dict[str, list[str]] = {"text": [], "Why": [], "Differs from": [], "Would have caught": []}
    for paragraph in re.split(r"\n\s*\n", re.sub(r"```python\n.*?```", "", body, flags=re.DOTALL).strip()):
        label = re.match(r"\*(Why|Differs from|Would have caught)\.\*\s*", paragraph)
        parts[label[1] if label else "text"].append(paragraph[label.end() :] if label else paragraph)
    text = "\n\n".join(parts["text"]).strip()
    if not re.search(r"\b(MUST|SHOULD|MAY)\b", text):
        raise SpecError(f"{where}: {heading['id']} contains none of MUST, SHOULD and MAY")
    letters = "".join(_LETTER.findall(text))
    if letters != ascii_lowercase[: len(letters)] or len(letters) == 1:
        raise SpecError(f"{where}: {heading['id']}: expected requirements (a), (b) and so on, got {', '.join(letters)}")
    if not parts["Why"]:
        raise SpecError(f"{where}: {heading['id']} has no '*Why.*' paragraph")
    if not any(">>>" in example for example in examples):
        raise SpecError(f"{where}: {heading['id']} has no example (a ```python block with >>>)")
    why, differs, caught = ("\n\n".join(parts[label]) for label in ("Why", "Differs from", "Would have caught"))
    return Clause(heading["id"], heading["title"], code, text, why, examples[0].strip(), differs, caught, path, start + 1)


def read_spec(folder: Path) -> tuple[Chapter, ...]:
    """Parse all chapters, in the order of CHAPTERS. Raises SpecError, also if two clauses have the same id."""
    chapters = tuple(read_chapter(folder / f"{name}.md") for name in CHAPTERS)
    seen: dict[str, Clause] = {}
    for clause in (clause for chapter in chapters for clause in chapter.clauses):
        if clause.id in seen:
            first = seen[clause.id]
            raise SpecError(f"{clause.path.name}:{clause.line}: {clause.id} is already defined at {first.path.name}:{first.line}")
        seen[clause.id] = clause
    return chapters


@cache
def spec() -> tuple[Chapter, ...]:
    """The chapters of the installed specification."""
    return read_spec(Path(str(files("kvref") / "spec")))


@cache
def all_clauses() -> dict[str, Clause]:
    return {clause.id: clause for chapter in spec() for clause in chapter.clauses}


def suggest_clause(word: str, among: Iterable[str] = ()) -> str:
    """A suggestion for a clause id that does not exist: ": did you mean PAGED-07?", or "" if no id is similar.

    among: further words to suggest.
    """
    known = [*all_clauses(), *among]
    family, _, number = word.upper().rpartition("-")
    likely = (
        [f"{family}-{number.zfill(2)}"] if f"{family}-{number.zfill(2)}" in known else get_close_matches(word.upper(), known, n=1)
    )
    return f": did you mean {likely[0]}?" if likely else ""
