"""The prose of the repository: plain words, unambiguous clauses, valid references."""

import re
from pathlib import Path

import plain_words
import pytest

import kvref
from kvref_conformance.clauses import SpecError, all_clauses, read_chapter

PAGES = [path for path in plain_words.files() if path.suffix == ".md"]
CHAPTER = """# Example (EX)

## EX-01 · A title

{text}

*Why.* A reason.

```python
>>> 1
1
```
"""


def test_prose_is_plain():
    broken = [
        f"{path.relative_to(plain_words.ROOT)}:{line}: {words!r}: write {instead}"
        for path in plain_words.files()
        for line, words, instead in plain_words.violations(path)
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("`read` MUST return tokens 0 .. n.", "0 .. n"),
        ("Nothing MUST change.", "Nothing MUST"),
        ("Only shared blocks MUST be copied.", "Only shared blocks MUST"),
        ("`read` MUST raise, or may return nothing.", "may"),
        ("`read` MUST give back the tokens.", "give back"),
        ("`read` MUST return a scale a row.", "a scale a row"),
        ("The caller who reads MUST NOT see more.", "who"),
    ],
)
def test_a_clause_that_is_not_plain_is_found(tmp_path, text, words):
    folder = tmp_path / "spec"
    folder.mkdir()
    (folder / "example.md").write_text(CHAPTER.format(text=text))
    assert words in [found for _, found, _ in plain_words.violations(folder / "example.md")]


def test_comments_and_docstrings_are_prose_and_code_is_not(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""Blocks behind others."""\nbehind = "behind"  # behind it\nwhoever = 1  # whoever, plain: ok\n')
    assert [(line, words) for line, words, _ in plain_words.violations(path)] == [(2, "behind"), (1, "behind")]


def test_messages_are_prose_and_words_alone_are_not(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        'a = f"{n} rows a block"\nb = ("free " "for ever")\nc = "behind"\nd = "behind it"  # plain: ok\ne = "`behind` it"\n'
    )
    assert [(line, words) for line, words, _ in plain_words.violations(path)] == [(1, "7 rows a block"), (2, "for ever")]


def test_what_a_clause_differs_from_can_be_looked_up():
    vague = [
        clause.id
        for clause in all_clauses().values()
        if clause.differs and not re.search(r"\d+\.\d+|\w/[\w.-]+#\d+|`[\w/]+\.(py|cpp|h|rs)`|https://", clause.differs)
    ]
    assert vague == []


def test_letters_that_are_not_in_order_are_refused(tmp_path):
    path = tmp_path / "example.md"
    path.write_text(CHAPTER.format(text="`read`:\n\n- (a) MUST raise;\n- (c) MUST NOT change anything."))
    with pytest.raises(SpecError, match=r"EX-01: expected requirements \(a\), \(b\) and so on, got a, c"):
        read_chapter(path)


def test_the_api_reference_has_every_public_name():
    page = (plain_words.ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert [name for name in kvref.__all__ if not re.search(rf"\bkvref\.(?:\w+\.)?{name}\b|members:.*\b{name}\b", page)] == []


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub and the site generate for a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_headings():
    broken = []
    for page in PAGES:
        for path, name in re.findall(r"\]\(([\w./-]*\.md)?#([^)]+)\)", page.read_text(encoding="utf-8")):
            target = (page.parent / path) if path else page
            if not target.is_file() or name not in headings(target):
                broken.append(f"{page.relative_to(plain_words.ROOT)}: {path}#{name}")
    assert broken == []


def test_a_phrase_across_a_line_break_is_found(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("# A page\n\nA block that is given\nback is free.\n")
    assert [(line, words) for line, words, _ in plain_words.violations(path)] == [(3, "given back")]
