"""The pages of `kvref report`: every cell has a link, and text from an implementation is never markup."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from kvref_conformance.clauses import all_clauses
from kvref_conformance.report.html import COLORS, is_report, make_badge, write_site
from kvref_conformance.report.json_file import ResultsError, read_json
from kvref_conformance.report.player_element import SCRIPTS
from kvref_conformance.report.results_model import FindingLink, ResultFile
from kvref_conformance.runner.verdict import overall_verdict
from kvref_conformance.testlib.registry import all_checks

EVIL = "<script>alert(1)</script>\"'&"
FAILED = {"what": EVIL, "expected": EVIL, "got": EVIL}


def document(name="mine", broken=("BLOCK-05",), expected=()):
    clauses = []
    for clause in all_clauses().values():
        there = clause.id.startswith("BLOCK")
        verdict = (
            "not offered" if not there else "xfailed" if clause.id in expected else "failed" if clause.id in broken else "passed"
        )
        fails = verdict in ("failed", "xfailed")
        check = {
            "check": "a check (blocks)", "verdict": "failed" if fails else verdict, "what": EVIL if fails else "",
            "expected": EVIL if fails else "", "got": EVIL if fails else "", "missing": "" if there else f"family {EVIL}",
            "calls": [EVIL] if fails else [],
        }  # fmt: skip
        clauses.append(
            {
                "clause": clause.id, "title": clause.title, "chapter": clause.chapter, "digest": clause.digest,
                "verdict": verdict, "offered": there, "missing": [] if there else [f"family {EVIL}"],
                "reason": EVIL if verdict == "xfailed" else None, "shown": "a check (blocks)" if fails else None,
                "trace": f".kvref/failures/{clause.id}-mine.jsonl" if fails else None, "checks": [check],
            }
        )  # fmt: skip
    conclusion = vars(overall_verdict(clauses))
    who = {"name": name, "version": EVIL, "language": EVIL, "level": "exact", "families": ["blocks"], "formats": []}
    asked = {"name": name, "seed": 0, "examples": 1, "deep": False, "slow": False, "timeout": 10, "isolate": False}
    environment = {"python": "3", "platform": "x", "packages": {}}
    return {
        "format": 3, "kvref": "0.1.0", "implementation": who, "environment": environment, "asked": asked,
        "conclusion": conclusion, "not_offered": [each["clause"] for each in clauses if not each["offered"]],
        "clauses": [each for each in clauses if each["offered"]],
    }  # fmt: skip


def trace(clause="BLOCK-05", failed=FAILED):
    """The text of a trace of one call."""
    who = {"name": EVIL, "version": EVIL, "language": EVIL, "level": "exact", "load": "mine"}
    header = {"trace": 1, "spec": "0.1.0", "clause": clause, "check": "a check (blocks)", "judge": "model", "implementation": who}
    lines = [
        header | {"failed": failed},
        {"id": 1, "op": "blocks.new", "args": {"num_blocks": 2}},
        {"id": 1, "ok": {"handle": 1}},
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines)


@pytest.fixture
def saved(tmp_path):
    def save(name, **options):
        path = tmp_path / f"{len(list(tmp_path.glob('*.json')))}.json"
        path.write_text(json.dumps(document(name, **options)))
        (tmp_path / ".kvref/failures").mkdir(parents=True, exist_ok=True)
        for clause in options.get("broken", ("BLOCK-05",)):
            (tmp_path / ".kvref/failures" / f"{clause}-mine.jsonl").write_text(trace(clause))
        return ResultFile(path, read_json(path))

    return save


class Links(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.ids, self.scripts = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.scripts += [found.get("type")] if tag == "script" else []
        self.ids |= {found["id"]} if "id" in found else set()
        self.links += [found[name] for name in ("href", "src") if name in found and not found[name].startswith("data:")]


def test_every_link_leads_to_a_page_a_place_a_trace_or_a_badge(tmp_path, saved):
    site = tmp_path / "site"
    write_site(site, [saved("one"), saved("two", broken=("BLOCK-01", "BLOCK-02")), saved(EVIL)])
    pages = list(site.rglob("*.html"))
    assert len(pages) == 2 + 3 + len(all_clauses())
    for page in pages:
        links = Links(page.read_text(encoding="utf-8"))
        for link in links.links:
            path, _, place = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), (page, link)
            if place:
                assert place in Links(target.read_text(encoding="utf-8")).ids, (page, link)


def test_what_came_from_an_implementation_is_text(tmp_path, saved):
    write_site(tmp_path / "site", [saved(EVIL, expected=("BLOCK-05",))])
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text
        loaded = ["application/jsonl", *[None] * len(SCRIPTS)]  # a trace, and the player that contains it
        tables = page.parent.name == "site"
        with_trace = page.stem == "BLOCK-05"
        assert Links(text).scripts == ([None] if tables else [*loaded[1:], loaded[0]] if with_trace else [])
    (picture,) = (tmp_path / "site" / "badges").iterdir()
    root = ElementTree.parse(picture).getroot()
    assert EVIL in root.get("aria-label")
    assert not root.findall(".//{*}script")


def test_names_that_look_alike_in_a_path_stay_apart(tmp_path, saved):
    write_site(tmp_path / "site", [saved("a b"), saved("a-b"), saved("a/b")])
    assert sorted(path.name for path in (tmp_path / "site" / "badges").iterdir()) == ["a-b.svg", "a=20b.svg", "a=2Fb.svg"]


@pytest.mark.parametrize(
    ("options", "said"), [({"broken": ()}, "7 clauses"), ({}, "breaks 1 of 7"), ({"expected": ("BLOCK-05",)}, "breaks 1 of 7")]
)
def test_a_badge_says_what_was_found(saved, options, said):
    words = [text.text for text in ElementTree.fromstring(make_badge(saved("x", **options))).findall(".//{*}text")]
    assert words == ["kvref 0.1.0", said]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "not valid JSON"),
        (lambda text: text.replace("exact", "exa\0ct"), "not valid JSON"),
        (lambda text: text.replace('"exact"', '"\\ud800"'), "not valid JSON: 'utf-8' codec"),
        (lambda text: text.replace('"seed": 0', f'"seed": {"9" * 5000}'), "not valid JSON: Exceeds the limit"),
        (lambda text: "[" * 100_000, "not valid JSON"),
        (lambda text: text.replace('"formats": []', f'"formats": {"[" * 400}{"]" * 400}'), "not results of kvref check --json"),
        (lambda text: text.replace('"packages": {}', f'"packages": {{"{"x" * 9000}": 1}}'), "not results of kvref check --json"),
        (lambda text: text.replace('"name": "mine"', '"name": "mi\\nne"', 1), "not results of kvref check --json"),
        (lambda text: text.replace('"name": "mine"', '"name": "mine\\n"', 1), "not results of kvref check --json"),
        (lambda text: text.replace('"name": "mine"', f'"name": "{"x" * 301}"', 1), "not results of kvref check --json"),
        (lambda text: text.replace('"name": "mine"', '"name": ["mine"]', 1), "not results of kvref check --json"),
        (lambda text: text.replace('"LAW-01"', '"LAW-02"'), "LAW-02 occurs 2 times"),
        (lambda text: text.replace(".kvref/failures/", "/etc/"), "not results of kvref check --json"),
        (lambda text: text.replace(".kvref/failures/", "../.kvref/failures/"), "not results of kvref check --json"),
        (lambda text: text + " " * 2**26, "larger than 64 MiB"),
        (lambda text: text.replace('"conclusion"', '"conclusions"'), "not results of kvref check --json"),
        (lambda text: text.replace('"judged": 7', '"judged": -7'), "not results of kvref check --json"),
        (lambda text: text.replace('"judged": 7', f'"judged": {"9" * 401}'), "not results of kvref check --json"),
        (lambda text: text.replace('"of": 7', f'"of": {"9" * 401}'), "not results of kvref check --json"),
        (lambda text: text.replace('"least": 50.0', '"least": NaN'), "not valid JSON: NaN is not a JSON number"),
        (lambda text: text.replace('"timeout": 10', '"timeout": -Infinity'), "not valid JSON: -Infinity is not a JSON number"),
        (lambda text: text.replace('"format": 3', '"format": 9'), "results of format 9; this kvref reads format 3"),
        (lambda text: text.replace('"passed"', '"splendid"'), "not results of kvref check --json"),
        (lambda text: "[]", "not results of kvref check --json"),
    ],
)
def test_what_is_no_results_is_refused(tmp_path, change, message):
    path = tmp_path / "results.json"
    path.write_text(change(json.dumps(document())))
    with pytest.raises(ResultsError, match=re.escape(str(path))) as refused:
        read_json(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_too_little_judged_is_not_green(saved, tmp_path):
    run = saved("little", broken=())
    for clause in run.document["clauses"][:40]:
        clause["offered"] = True  # offered, but not judged
    few = sum(clause["offered"] for clause in run.document["clauses"])
    assert (run.summary, run.color) == (f"not judged: 7 of {few}", "some")
    assert COLORS["some"] in make_badge(run) and COLORS["good"] not in make_badge(run)
    write_site(tmp_path / "site", [run])
    page = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert '<span class="pill xfailed">not judged</span>' in page
    assert '<span class="verdict xfailed">7</span>' in page  # without the sign of a pass
    own = (tmp_path / "site/implementations/little.html").read_text(encoding="utf-8")
    assert f"<p>not judged: 7 of {few} clauses of its families have a verdict, less than 50 % (--least-judged)</p>" in own


@pytest.mark.parametrize(
    ("broken", "interrupted", "said", "colour", "sentence"),
    [
        (("BLOCK-05",), {}, "breaks 1 of 7", "bad", "not conformant; 7 of 7 clauses of its families judged<"),
        ((), {}, "7 clauses", "good", "conformant: 7 of 7 clauses of its families judged, all passed<"),
        ((), {"interrupted": True}, "not judged: 7 of 7", "some", "not judged: 7 of 7 clauses of its families have a verdict,"),
    ],
)
def test_the_conclusion_is_the_clauses_not_the_files(tmp_path, broken, interrupted, said, colour, sentence):
    denied = {"verdict": "not conformant, as expected", "judged": 147, "of": 148, "least": 50.0, "whole": False}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(document(broken=broken) | {"conclusion": denied} | interrupted))
    run = ResultFile(path, read_json(path))
    assert (run.summary, run.color) == (said, colour)
    write_site(tmp_path / "site", [run])
    page = (tmp_path / "site/implementations/mine.html").read_text(encoding="utf-8")
    assert f"<p>{sentence}" in page
    assert "147" not in page


def test_a_part_is_not_green(saved):
    whole = saved("whole", broken=())
    clauses = [each for each in whole.document["clauses"] if each["offered"]]
    part = ResultFile(whole.path, {**whole.document, "clauses": clauses})
    assert (whole.conclusion.whole, whole.color) == (True, "good")
    assert (part.conclusion.verdict, part.conclusion.whole, part.color) == ("conformant", False, "some")
    assert part.summary == f"{whole.summary} selected"
    assert COLORS["good"] in make_badge(whole) and COLORS["good"] not in make_badge(part)


def test_a_folder_is_known_as_a_report_by_its_first_page(saved, tmp_path):
    write_site(tmp_path / "site", [saved("one")])
    assert is_report(tmp_path / "site")
    (tmp_path / "mine").mkdir()
    assert not is_report(tmp_path / "mine")
    (tmp_path / "mine/index.html").write_text("<title>KV caches by clauses</title>")
    assert not is_report(tmp_path / "mine")


def rows_of(page):
    """By chapter, the cells of each implementation on the first page: their texts and titles."""
    text = page.read_text(encoding="utf-8")
    chapters = re.findall(r'<abbr title="[^"]*">(\w+)</abbr>', text)
    found = {}
    for row in re.findall(r'<tr class="run".*?</tr>', text, re.DOTALL):
        cells = [" ".join(re.sub("<[^>]+>", "", cell).split()) for cell in re.findall(r"<td>(.*?)</td>", row)]
        found[re.search(r'html">([^<]*)</a>', row)[1]] = dict(zip(chapters, cells, strict=True))
    return found


def test_a_share_tells_what_failed_what_passed_and_what_of_it_through_others(saved, tmp_path):
    run = saved("one", broken=("BLOCK-02", "BLOCK-03"), expected=("BLOCK-03",))
    for clause in run.document["clauses"]:
        if clause["clause"] in ("BLOCK-01", "BLOCK-02", "BLOCK-04"):
            clause["through"] = ["blocks.allocate_many through allocate"]
    page = write_site(tmp_path / "site", [run, saved("two", broken=())])
    assert rows_of(page)["one"] | {"BLOCK": "✗ 2 of 7 2*", "PAGED": "·"} == rows_of(page)["one"]
    assert rows_of(page)["two"]["BLOCK"] == "✓ 7"
    text = page.read_text(encoding="utf-8")
    assert 'title="BLOCK, one: 2 failed; 5 passed, 2 of them with derived operations"' in text
    assert text.count("of them with derived operations</li>") == 1


def test_stale_clauses_are_counted_and_listed(saved, tmp_path):
    current, old = saved("current"), saved("old")
    for run in (current, old):  # a run of the clauses BLOCK-*, with all checks of today
        clauses = [clause for clause in run.document["clauses"] if clause["offered"]]
        for clause in clauses:
            names = [check.name for check in all_checks() if (check.clause, check.family) == (clause["clause"], "blocks")]
            clause["checks"] += [{**clause["checks"][0], "check": name} for name in names]
        run.document["clauses"], run.document["conclusion"]["whole"] = clauses, False
    old.document["clauses"][0]["digest"] = "0" * 8
    page = write_site(tmp_path / "site", [current, old]).read_text(encoding="utf-8")
    assert page.count(" stale</a>") == 1
    assert '<a href="implementations/old.html#stale">1 stale</a>' in page
    about = (tmp_path / "site/implementations/old.html").read_text(encoding="utf-8")
    assert f"<li>{old.document['clauses'][0]['clause']}: its text changed</li>" in about
    assert 'id="stale"' not in (tmp_path / "site/implementations/current.html").read_text(encoding="utf-8")


def test_a_failure_leads_to_what_is_said_of_it(saved, tmp_path):
    told = {("one", "BLOCK-05"): [FindingLink(EVIL, "../findings/one.html#place")]}
    write_site(tmp_path / "site", [saved("one"), saved("two")], told)
    for path, times in (("clauses/BLOCK-05.html", 1), ("implementations/one.html", 1), ("implementations/two.html", 0)):
        text = (tmp_path / "site" / path).read_text(encoding="utf-8")
        assert text.count('<a href="../../findings/one.html#place">') == times
        assert "<script>alert" not in text
