"""Untrusted results: no field of a results file causes a traceback or links to a file that is not its trace."""

import copy
import functools
import json
import os

import pytest
from test_report import FAILED, document, trace

from kvref_conformance.report.html import write_site
from kvref_conformance.report.json_file import ResultsError, read_json
from kvref_conformance.report.results_model import ResultFile
from kvref_conformance.report.trace_links import find_trace


@pytest.mark.parametrize("value", [None, True, -1, 1e400, "x" * 10**6, [], [[]], {}, {"x": None}])
def test_whatever_stands_in_it_costs_one_line_or_makes_a_page(tmp_path, value):
    """Every field of a document is replaced by other values, or removed: either a one-line message or a page."""
    small = document()
    small["clauses"] = [each for each in small["clauses"] if each["clause"] == "BLOCK-05"]
    small["not_offered"] = ["LAW-01"]

    def places(part, path=()):
        entries = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        for key, inner in entries:
            yield (*path, key)
            yield from places(inner, (*path, key))

    for number, place in enumerate(places(small)):
        changed = copy.deepcopy(small)
        *outer, last = place
        holder = functools.reduce(lambda part, key: part[key], outer, changed)
        holder[last] = value
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(changed))
        try:
            run = ResultFile(path, read_json(path))
        except ResultsError:
            continue
        write_site(tmp_path / f"site{number}", [run])


def outside(folder):
    (folder.parent / "secret.jsonl").write_text(trace())
    return folder.parent / "secret.jsonl"


LINKS = {
    "a link out of the folder": lambda folder, file: file.symlink_to(outside(folder)),
    "a folder that is a link": lambda folder, file: (
        (folder / "elsewhere").mkdir(),
        (folder / "elsewhere" / file.name).write_text(trace()),
        file.parent.rmdir(),
        file.parent.symlink_to(folder / "elsewhere"),
    ),
    "a link in a circle": lambda folder, file: file.symlink_to(file),
    "a pipe": lambda folder, file: os.mkfifo(file),
    "a folder": lambda folder, file: file.mkdir(),
    "not text": lambda folder, file: file.write_bytes(b"\xff\xfe"),
    "no trace": lambda folder, file: file.write_text("root:x:0:0\n"),
    "half a trace": lambda folder, file: file.write_text(trace()[:-20]),
    "brackets without end": lambda folder, file: file.write_text(trace() + "[" * 100_000),
    "deep brackets": lambda folder, file: file.write_text(trace().replace("2}", "[" * 300 + "]" * 300 + "}", 1)),
    "too much": lambda folder, file: file.write_text(trace().replace('"spec": "', f'"spec": "{"0" * 2**26}')),
    "of another clause": lambda folder, file: file.write_text(trace("BLOCK-04")),
    "of another run": lambda folder, file: file.write_text(trace(failed=FAILED | {"got": "4"})),
    "none": lambda folder, file: None,
}


@pytest.mark.parametrize("way", LINKS)
def test_only_the_trace_of_that_failure_is_taken(tmp_path, monkeypatch, way):
    folder = tmp_path / "project"
    file = folder / ".kvref/failures/BLOCK-05-mine.jsonl"
    file.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    LINKS[way](folder, file)
    path = folder / "results.json"
    path.write_text(json.dumps(document()))
    write_site(tmp_path / "site", [ResultFile(path, read_json(path))])
    assert [each for each in (tmp_path / "site").rglob("*") if "traces/" in each.as_posix()] == []
    assert 'class="trace"' not in (tmp_path / "site/clauses.html").read_text(encoding="utf-8")
    for page in ("clauses/BLOCK-05.html", "implementations/mine.html"):
        assert "<kv-player" not in (tmp_path / "site" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    ["../secret.jsonl", "/etc/hostname", ".kvref/failures/../../secret.jsonl", ".kvref/failures/a/b.jsonl", "secret.jsonl"],
)
def test_a_path_of_a_trace_leads_nowhere_else(tmp_path, name):
    """Calls the function itself, because the schema rejects such names earlier."""
    project = tmp_path / "project"
    (project / ".kvref/failures/a").mkdir(parents=True)
    for place in (tmp_path / "secret.jsonl", project / "secret.jsonl", project / ".kvref/failures/a/b.jsonl"):
        place.write_text(trace())
    assert find_trace(project / "results.json", name, "BLOCK-05", FAILED) is None


@pytest.mark.parametrize("results", ["results.json", "out/deep/results.json"])
def test_a_trace_is_found_below_the_results_or_a_folder_above_them(tmp_path, results):
    (tmp_path / ".kvref/failures").mkdir(parents=True)
    (tmp_path / ".kvref/failures/BLOCK-05-zoo+x.jsonl").write_text(trace())
    found = find_trace(tmp_path / results, ".kvref/failures/BLOCK-05-zoo+x.jsonl", "BLOCK-05", FAILED)
    assert found == trace()
