"""A verdict that needed derived operations is marked as such, in text, in JSON and in the report."""

import json

import pytest

from kvref_conformance.clauses import all_clauses
from kvref_conformance.report.html import write_site
from kvref_conformance.report.json_file import read_json
from kvref_conformance.report.results_model import ResultFile

# Gather is missing, and one layer's length is wrong: the derived gather shows it.
CACHES = """
import numpy as np
import kvref
from kvref_conformance.implementations.backends import OnBackend

class NoGather(OnBackend):
    def __init__(self): super().__init__(kvref.reference)

    def paged(self, **config):
        cache = kvref.PagedCache(kvref.PagedConfig(**config))
        class Few:
            create, drop, write, read = cache.create, cache.drop, cache.write, cache.read
            ensure_capacity, length, utilization = cache.ensure_capacity, cache.length, property(lambda self: cache.utilization)
        return Few()

class Forgets(OnBackend):
    def __init__(self): super().__init__(kvref.reference)

    def paged(self, **config):
        cache = kvref.PagedCache(kvref.PagedConfig(**config))
        class Few:
            create, drop, write, length = cache.create, cache.drop, cache.write, cache.length
            def read(self, sequence, layer, positions):
                keys, values = cache.read(sequence, layer, positions)
                return keys, values * 0
        return Few()
"""
GATHERED = "paged.gather through length and read"


@pytest.fixture
def caches(tmp_path):
    (tmp_path / "caches.py").write_text(CACHES)


def test_the_table_and_the_json_say_which_operations_were_made_of_others(kvref, caches, tmp_path):
    done = kvref("check", "caches:NoGather", "--clause", "PAGED-01,PAGED-04,PAGED-11,LAW-12", "--family", "paged",
                 "--examples", "5", "--json", "out.json")  # fmt: skip
    assert f"derived: {GATHERED} (2 clauses)" in done.stdout.splitlines()
    through = {each["clause"]: each["through"] for each in read_json(tmp_path / "out.json")["clauses"]}
    assert through == {
        "LAW-12": [],
        "PAGED-01": [GATHERED],
        "PAGED-04": ["paged.num_free_blocks through utilization"],
        "PAGED-11": [GATHERED],
    }
    assert "derived" not in kvref("check", "numpy", "--clause", "PAGED-11", "--examples", "5").stdout


def test_a_failure_says_what_was_made_of_others(kvref, caches):
    done = kvref("check", "caches:Forgets", "--clause", "PAGED-11", "--examples", "5")
    assert done.returncode == 1
    assert f"  derived  {GATHERED}" in done.stdout.splitlines()


def test_a_mark_in_the_report_tells_a_verdict_through_others_from_one_without(kvref, caches, tmp_path):
    kvref("check", "caches:NoGather", "--clause", "PAGED-11,LAW-12", "--examples", "5", "--json", "out.json")
    write_site(tmp_path / "site", [ResultFile(tmp_path / "out.json", read_json(tmp_path / "out.json"))])
    page = (tmp_path / "site/clauses.html").read_text(encoding="utf-8")
    assert page.count("<sup>*</sup>") == 1
    assert page.count(f'href="clauses/PAGED-11.html#reference" data-through="{GATHERED}"') == page.count("data-through=") == 1
    assert "judged with derived operations" in page  # the legend
    assert f"<code>{GATHERED}</code>" in (tmp_path / "site/clauses/PAGED-11.html").read_text(encoding="utf-8")
    assert GATHERED not in (tmp_path / "site/clauses/LAW-12.html").read_text(encoding="utf-8")


def test_results_written_before_there_were_derived_operations_are_read(kvref, tmp_path):
    kvref("check", "numpy", "--clause", "BLOCK-05", "--examples", "5", "--json", "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    for each in document["clauses"]:
        del each["through"]
        for check in each["checks"]:
            check.pop("through", None)
    (tmp_path / "old.json").write_text(json.dumps(document))
    run = ResultFile(tmp_path / "old.json", read_json(tmp_path / "old.json"))
    write_site(tmp_path / "site", [run])
    for page in ("index.html", "clauses.html"):
        assert "<sup>" not in (tmp_path / "site" / page).read_text(encoding="utf-8")
    assert len(all_clauses()) > len(run.verdicts) == 1
