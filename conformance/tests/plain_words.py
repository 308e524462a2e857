"""Find words and phrases that are not plain technical English: `python conformance/tests/plain_words.py [FILE ...]`.

Each rule is a pattern and what to write instead. PROSE applies to Markdown outside code, and in Python to comments, docstrings,
and literals and f-strings with a space. NORMATIVE applies to the clauses of the specification alone, between a clause's heading
and its `*Why.*`. A line that needs a word in another sense ends with `plain: ok` in a comment, in Markdown `<!-- plain: ok -->`.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
UNIT = (
    "row|token|head|block|layer|sequence|group|step|channel|second|clause|"
    "family|project|number|value|element|page|rank|request|session"
)
PROSE = {
    r"\b(?:give|gives|gave|given|giving) (?:\w+ ){0,3}back\b": "free, or return to the pool",
    r"\bhangs? on\b": "depends on",
    r"\bbehind\b": "after",
    r"\bwho(?:so)?ever\b": "name the agent: the caller, the cache, the scheduler",
    r"(?:^|[.:;] )Who (?![^.]*\?)": "name the agent, or ask a question",
    r"\b(?:no one|nobody|somebody|someone)\b": "name the agent, or use the passive",
    r"\bturned back\b|\bturned keys\b|\bkeys? (?:is|are) turned\b": "rotated",
    r"\bwhere (?:they|two|both) part\b|\bthey part\b|\bparts? from (?:it|what|the)\b": "the first mismatch",
    r"\bfindable\b": "cached (in the prefix index)",
    r"\breal sizes?\b": "production sizes",
    r"\bruler\b": "precision probe",
    r"\bthe books\b": "bookkeeping, allocator state",
    r"\bas (?:short|small) as (?:it|they) can be\b": "minimal",
    r"\bwhat other people wrote\b|\bwhat others wrote\b|\bother people's\b": "third-party implementations",
    r"\bmade of others\b": "derived",
    rf"\b(?:a|an|one|two|four|\d+) [\w-]+ an? (?:{UNIT})\b": "per",
    r"\bone after the other\b": "in order",
    r"\ball the same\b": "still, or leave it out",
    r"\bfor ever\b": "never again, or permanently",
    r"\bwithout a word\b": "silently",
    r"\bhold (?:it|them|that|those calls|a conversation) again\b": "replay",
    r"\bgone? on from\b|\bgoes on from\b": "continue from",
    r"\bso many\b": "that many, or the number",
    r"\bcame? of\b": "result",
}
NORMATIVE = {
    r"\b(?:may|must|can|cannot|should|shall)\b": "MAY, MUST, MUST NOT, or a fact in the indicative",
    r"\S \.\. \S": "a half-open range [a, b)",
    r"\b(?:Nothing|No one|Nobody) MUST\b": "X MUST NOT",
    r"\bOnly\b[^.;]*\bMUST\b": "X MUST NOT, for all others",
    r"\b(?i:none|no \w+) (?:MUST|MAY)\b": "X MUST NOT",
    r"\b(?i:who|those|these)\b": "repeat the noun",
    r"\b(?:say|says|said|tell|tells|told|ask|asks|asked|come|comes|came|goes|went|gone|"
    r"lie|lies|lay|wait|waits)\b": "a verb for what software does",
    r"\bor whoever\b|\bnor may\b": "two sentences",
}  # fmt: skip
PROSE = {f"(?i:{pattern})" if pattern.islower() else pattern: instead for pattern, instead in PROSE.items()}
ANY_RULE = {id(rules): re.compile("|".join(f"(?:{pattern})" for pattern in rules)) for rules in (PROSE, NORMATIVE)}
ALLOWED = "plain: ok"
EXAMPLES = ("plain_words.py", "test_language.py")  # files whose literals are the rules above, or sentences that break them


def violations(path: Path) -> Iterator[tuple[int, str, str]]:
    """Return (line, words, replacement) for each rule that a file breaks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
        yield from _broken(list(_prose_of_python(text, nodes)), PROSE)
        for message in _messages_of_python(text, nodes) if path.name not in EXAMPLES else ():
            yield from _broken([message], PROSE)
        return
    lines = list(_prose_of_markdown(text))
    yield from _broken(lines, PROSE)
    if path.parent.name == "spec":
        yield from _broken([line for line in lines if line[2]], NORMATIVE)


def _broken(lines: list[tuple[int, str, bool]], rules: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """Return what `violations` does, for lines. Most lines break no rule, which one search for any of them shows."""
    for at, (number, line, _) in enumerate(lines):
        following = lines[at + 1] if at + 1 < len(lines) else (0, "", False)
        wrapped = f"{line} {following[1].strip()}" if following[0] == number + 1 else line  # a phrase across a line break
        for pattern, instead in rules.items() if ANY_RULE[id(rules)].search(wrapped) else ():
            found = re.search(pattern, wrapped)
            if found and found.start() < len(line) and ALLOWED not in wrapped[: max(found.end(), len(line))]:
                yield number, found[0].strip(), instead


def _prose_of_markdown(text: str) -> Iterator[tuple[int, str, bool]]:
    """Return (number, line, whether it is normative) of the lines outside code blocks, with code spans blanked."""
    fence, normative = False, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            fence = not fence
            continue
        if line.startswith("#"):
            normative = bool(re.match(r"## [A-Z]+(-[A-Z0-9]+)?-\d\d ", line))
            yield number, line, False
        elif not fence:
            if re.match(r"\*(Why|Differs from|Would have caught|Note|Example)\.\*", line):
                normative = False
            yield number, re.sub(r"`[^`]*`", "``", line), normative


def _prose_of_python(text: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Return (number, line, False) of the comments, and of the docstrings with code spans blanked."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            first = node.body[0]
            assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            for offset, line in enumerate(str(first.value.value).splitlines()):
                yield first.lineno + offset, re.sub(r"`[^`]*`", "``", line), False


def _messages_of_python(text: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str, bool]]:
    """Return the literals and f-strings with a space that are no docstrings. A value in braces counts as the number 7."""
    lines = text.splitlines()
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            message = "".join(str(part.value) if isinstance(part, ast.Constant) else "7" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            message = node.value
        else:
            continue
        if " " in message and not any(ALLOWED in line for line in lines[node.lineno - 1 : node.end_lineno]):
            yield node.lineno, re.sub(r"`[^`]*`", "``", " ".join(message.split())), False


def files() -> list[Path]:
    """Return the Markdown and Python files of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def main(names: list[str]) -> int:
    found = 0
    for path in [Path(name) for name in names] or files():
        for line, words, instead in violations(path):
            found += 1
            print(f"{path}:{line}: {words!r}: write {instead}")
    return found > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
