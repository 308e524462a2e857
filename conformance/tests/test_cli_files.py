"""Files that the `kvref` command writes: results as JSON and JUnit, and the report."""

import json
import xml.etree.ElementTree as ElementTree

import jsonschema

from kvref_conformance.families import names
from kvref_conformance.json_schema import read_schema
from kvref_conformance.report.json_file import SCHEMA, read_json


def test_a_report_is_made_of_results(kvref, tmp_path):
    kvref("check", "mine:FreesTwice", "--clause", "BLOCK-0*", "--json", "mine.json")
    kvref("check", "numpy", "--clause", "BLOCK-0*", "--json", "numpy.json")
    done = kvref("report", "mine.json", "numpy.json", "-o", "site")
    assert (done.returncode, done.stdout) == (0, "site/index.html: 2 implementations\n")
    assert (tmp_path / "site" / "traces" / "frees=5Bbold=5Dtwice" / "BLOCK-05.jsonl").exists()
    assert "frees[bold]twice" in (tmp_path / "site" / "index.html").read_text()
    done = kvref("report", "mine.json", "numpy.json", "mine.json", "-o", "site")
    assert (done.returncode, done.stderr) == (
        2,
        "kvref: two results of frees[bold]twice: mine.json and mine.json; "
        "give each a name: kvref report before=mine.json after=mine.json\n",
    )
    done = kvref("report", "before=mine.json", "after=mine.json", "-o", "site")  # replaces the existing report
    assert (done.returncode, done.stdout) == (0, "site/index.html: 2 implementations\n")
    for label in ("before", "after"):
        assert (tmp_path / "site" / "badges" / f"{label}.svg").exists()
        assert (tmp_path / "site" / "traces" / label / "BLOCK-05.jsonl").exists()
        assert f"<h1>{label}</h1>" in (tmp_path / "site/implementations" / f"{label}.html").read_text()
    assert "expected NAME=FILE" in kvref("report", "=mine.json", "-o", "site").stderr
    assert "RESULTS.json: no file no.json (kvref check " in kvref("report", "x=no.json", "-o", "site").stderr
    (tmp_path / "other.json").write_text("{}")
    assert "other.json: not results of kvref check --json" in kvref("report", "other.json", "-o", "site").stderr
    assert "--output: expected a folder, got the file mine.json\n" in kvref("report", "mine.json", "-o", "mine.json").stderr


def test_a_report_is_written_over_a_report_alone(kvref, tmp_path):
    kvref("check", "numpy", "--clause", "BLOCK-01", "--json", "numpy.json")
    (tmp_path / "empty").mkdir()
    for folder in ("new/deep", "empty", "empty"):
        done = kvref("report", "numpy.json", "-o", folder)
        assert (done.returncode, done.stdout) == (0, f"{folder}/index.html: 1 implementation\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/index.html").write_text("<h1>my own site</h1>")
    done = kvref("report", "numpy.json", "-o", "mine")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("kvref: --output: mine is not empty and is not a kvref report")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["index.html"]
    assert (tmp_path / "mine/index.html").read_text() == "<h1>my own site</h1>"


def test_json_holds_the_verdicts(kvref, tmp_path):
    done = kvref("check", "mine:FreesTwice", "--clause", "BLOCK-0*", "--json", "out.json", "--seed", "5")
    document = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 1
    jsonschema.validate(document, read_schema(*SCHEMA))
    assert (document["format"], document["asked"]["seed"], document["implementation"]["language"]) == (3, 5, "python")
    assert document["implementation"]["families"] == sorted(document["implementation"]["families"], key=names().index)
    verdicts = {clause["clause"]: clause["verdict"] for clause in document["clauses"]}
    assert verdicts == {f"BLOCK-0{n}": "failed" if n == 5 else "passed" for n in range(1, 8)}
    (failed,) = [clause for clause in document["clauses"] if clause["verdict"] == "failed"]
    assert failed["trace"] == ".kvref/failures/BLOCK-05-mine+FreesTwice.jsonl"
    assert document["conclusion"] == {"verdict": "not conformant", "judged": 7, "of": 7, "least": 50.0, "whole": False}
    assert document["environment"]["packages"]["numpy"]


def test_json_names_once_what_is_not_offered(kvref, tmp_path):
    kvref("check", "mine:OnlyKernels", "--clause", "KERN-01,KERN-08,LAW-01,LAW-18", "--json", "out.json")
    text = (tmp_path / "out.json").read_text()
    document = json.loads(text)
    assert document["not_offered"] == ["LAW-01"]
    listed = {clause["clause"]: clause for clause in document["clauses"]}
    assert list(listed) == ["LAW-18", "KERN-01", "KERN-08"]
    assert all(check["check"].endswith(" (kernels)") for check in listed["LAW-18"]["checks"])
    assert [line.strip(" ,") for line in text.splitlines()[-5:-2]] == [json.dumps(clause) for clause in document["clauses"]]
    read = read_json(tmp_path / "out.json")["clauses"]
    assert [each["clause"] for each in read] == ["LAW-01", "LAW-18", "KERN-01", "KERN-08"]
    assert (read[0]["verdict"], read[0]["offered"], read[0]["chapter"], read[0]["checks"]) == ("not offered", False, "LAW", [])


def test_junit_holds_the_verdicts(kvref, tmp_path):
    kvref("check", "mine:FreesTwice", "--clause", "BLOCK-0*", "--junit", "out.xml")
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase")}
    assert len(cases) == 7
    assert "expected BlockNotAllocated" in cases["BLOCK-05[frees[bold]twice]"].find("failure").text


def test_stale_results_are_listed_with_the_reason(kvref, tmp_path):
    kvref("check", "numpy", "--clause", "BLOCK-0*", "--json", "numpy.json")
    done = kvref("report", "numpy.json", "--stale")
    assert (done.returncode, done.stdout) == (0, "1 of 1 up to date\n")
    document = json.loads((tmp_path / "numpy.json").read_text())
    first, second, third, *_ = document["clauses"]
    first["digest"] = "0" * 8
    lost = second["checks"].pop(0)["check"]
    document["clauses"].remove(third)
    (tmp_path / "old.json").write_text(json.dumps(document))
    date = document["environment"]["date"]
    expected = [
        f"old.json: numpy 0.1.0, judged on {date}",
        "  BLOCK-01: its text changed",
        f"  BLOCK-02: new check: {lost}",
        "0 of 1 up to date",
    ]
    done = kvref("report", "old.json", "--stale")
    assert (done.returncode, done.stdout.splitlines()) == (1, expected)  # BLOCK-03 may not have been selected
    document["conclusion"]["whole"] = True
    (tmp_path / "old.json").write_text(json.dumps(document))
    lines = kvref("report", "old.json", "--stale").stdout.splitlines()
    assert "  BLOCK-03: it is new" in lines and "  PAGED-01: it is new" in lines
