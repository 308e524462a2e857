"""The report in headless Chromium, from file:// without a network (nox -s browser)."""

import json

import pytest
from test_report import EVIL, document, trace

from kvref_conformance.clauses import all_clauses
from kvref_conformance.report.html import write_site
from kvref_conformance.report.json_file import read_json
from kvref_conformance.report.results_model import ResultFile

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / ".kvref/failures").mkdir(parents=True)
    (folder / ".kvref/failures/BLOCK-05-mine.jsonl").write_text(trace())
    documents = [document(name) for name in ("one", "two", "three", EVIL)] + [document("good", broken=())]
    paths = [folder / f"{number}.json" for number in range(len(documents))]
    for path, each in zip(paths, documents, strict=True):
        path.write_text(json.dumps(each))
    return write_site(folder / "site", [ResultFile(path, read_json(path)) for path in paths])


@pytest.fixture
def open_report(open_page, site):
    return lambda path="clauses.html", width=1280, scheme="light": open_page(site.parent / path, width, scheme)


def shown(page):
    return page.locator("tr.clause:visible").count()


def test_the_filters_narrow_the_matrix_and_show_all_undoes_them(open_report):
    page = open_report()
    everything = shown(page)
    page.select_option("select[name=chapter]", "PAGED")
    assert shown(page) == sum(clause.chapter == "PAGED" for clause in all_clauses().values())
    page.select_option("select[name=verdict]", "failed")
    assert shown(page) == 0
    assert page.locator("#count").text_content() == f"0 of {everything} clauses"
    page.select_option("select[name=chapter]", "")
    assert shown(page) == 1
    page.select_option("select[name=verdict]", "")
    page.select_option("select[name=family]", "buffers")
    assert 9 < shown(page) < everything
    page.click("button[type=reset]")
    page.wait_for_function(f"document.querySelectorAll('tr.clause:not([hidden])').length === {everything}")


def test_a_failing_mark_leads_to_its_clause_and_its_trace(open_report):
    page = open_report()
    row = page.locator("tr.clause", has_text="BLOCK-05")
    assert row.locator("a.trace").first.get_attribute("href") == "traces/one/BLOCK-05.jsonl"
    row.locator("a.verdict").first.click()
    assert page.url.endswith("clauses/BLOCK-05.html#one")
    assert page.locator("h1").text_content().startswith("BLOCK-05")
    assert page.locator("article#one .pill").text_content() == "failed"
    assert EVIL in page.locator("article#one pre").text_content()


def test_the_keyboard_reaches_every_mark(open_report):
    page = open_report()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("tr.clause", has_text="BLOCK-01").locator("a.id").focus()
    page.keyboard.press("ArrowRight")
    first = page.evaluate("document.activeElement.title")
    assert first.startswith("BLOCK-01, one: ")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.title").startswith("BLOCK-02, one: ")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.title").startswith("BLOCK-02, two: ")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_url("**/clauses/BLOCK-01.html#two")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["index.html", "clauses.html", "clauses/BLOCK-05.html", "implementations/one.html"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_page_fits_its_window_and_can_be_read(open_report, width, path, scheme):
    page = open_report(path, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for selector in ("body", ".passed", ".failed", ".quiet"):
        for element in page.locator(selector).all()[:3]:
            assert contrast(element) >= 4.5, selector


CONTRAST = """element => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = text => rgb(text).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let back = element;
  while (back && /rgba\\(0, 0, 0, 0\\)|transparent/.test(getComputedStyle(back).backgroundColor)) back = back.parentElement;
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(back || document.body).backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""


def contrast(element):
    """The WCAG contrast ratio between an element's text and its background."""
    return element.evaluate(CONTRAST)


def test_what_an_implementation_says_is_never_run(open_report):
    page = open_report("clauses/BLOCK-05.html")
    assert page.locator("article pre").count() == 4
    assert page.locator("kv-player script").count() == 4  # their traces, which are data


def test_badges_are_pictures(open_report):
    page = open_report("implementations/one.html")
    (width,) = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert width > 100


def test_the_filters_narrow_the_implementations(open_report):
    page = open_report("index.html")
    shown = page.locator("tr.run:visible")
    assert shown.count() == 5
    page.select_option("select[name=project]", "good")
    assert shown.count() == 1
    assert page.locator("#count").text_content() == "1 of 5 implementations"
    page.select_option("select[name=family]", "blocks")
    page.select_option("select[name=language]", EVIL)
    assert shown.count() == 1
    page.click("button[type=reset]")
    page.wait_for_function("document.querySelectorAll('tr.run:not([hidden])').length === 5")


def test_a_share_leads_to_its_clauses_and_a_failure_to_its_trace_in_the_player(open_report):
    page = open_report("index.html")
    page.locator("tr.run", has_text="two").locator("a.mark", has_text="✗ 1 of 7").click()
    assert page.url.endswith("implementations/two.html#BLOCK")
    page.locator("#BLOCK article").get_by_role("link", name="The calls, step by step").click()
    assert page.url.endswith("clauses/BLOCK-05.html#two")
    page.locator("article#two summary").first.click()
    player = page.locator("article#two kv-player")
    assert player.locator(".kv-heading strong").text_content() == "BLOCK-05 · a check (blocks)"
    assert player.locator(".kv-count").text_content() == "1 / 1"
