"""The site in headless Chromium: every page, at phone and desktop width, light and dark, without a network (nox -s browser).

The site has to be built (nox -s docs). If AXE names a copy of axe-core, it checks contrast and labels.
"""

import os
import re
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from browser import SITE, needs_site

from kvref_conformance.clauses import all_clauses, spec

AXE = os.environ.get("AXE", "")
pytestmark = [pytest.mark.browser, needs_site]
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))


def some_of(*folders):
    """All pages, but only two of each folder whose pages have one template."""
    alike = [page for folder in folders for page in [each for each in PAGES if each.startswith(folder)][2:]]
    return [page for page in PAGES if page not in alike]


class Links(HTMLParser):
    """The link targets of a page, and the anchors that it has."""

    def __init__(self, path):
        super().__init__()
        self.targets, self.ids, self.images = [], set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        self.targets += [found[name] for name in ("href", "src") if found.get(name)]
        if tag == "img":
            self.images.append(found)


def test_every_link_leads_somewhere():
    pages = {page: Links(SITE / page) for page in PAGES}
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme:
                assert parts.scheme in ("https", "data", "mailto"), f"{page}: {target}"
                continue
            path = ((SITE / page).parent / unquote(parts.path)).resolve() if parts.path else SITE / page
            name = path.relative_to(SITE.resolve()).as_posix() if path.is_relative_to(SITE.resolve()) else page
            if not path.is_file() or (parts.fragment and name in pages and unquote(parts.fragment) not in pages[name].ids):
                broken.append(f"{page}: {target}")
    assert len(pages) > 150
    assert broken == []


def test_every_picture_says_what_it_shows():
    for page in PAGES:
        for image in Links(SITE / page).images:
            assert len(image.get("alt") or "") > 20, f"{page}: {image.get('src')}"


def test_no_page_points_to_a_place_on_this_machine():
    for page in PAGES:
        text = (SITE / page).read_text(encoding="utf-8")
        assert "file://" not in text, page
        assert str(SITE.parents[2]) not in text, page


def test_a_file_that_names_itself_is_named_once():
    for page in PAGES:
        text = (SITE / page).read_text(encoding="utf-8")
        for named in re.finditer(
            r' \(<code[^>]*><span class="pre">([\w-]*[./][\w./-]+)</span>', text
        ):  # only what has a dot or a slash: "a way to write (`write`)" names no file
            assert not text.endswith(named[1], 0, named.start()), page


LARGEST_PAGE = 2**20  # bytes
MOST_ELEMENTS = 40_000  # of one page: more take a browser longer than a second


def test_no_page_is_large():
    sizes = {page: (SITE / page).stat().st_size for page in PAGES}
    assert {page: size for page, size in sizes.items() if size > LARGEST_PAGE} == {}


@pytest.mark.parametrize("page", ["matrix/index.html", "matrix/clauses.html", "findings.html"])
def test_a_table_of_results_has_few_elements(open_page, page):
    assert 1000 < open_page(SITE / page).evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS


@pytest.fixture(scope="module")
def address():
    """The address of the site on a local server: a search reads pages, which browsers forbid for files."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def search(browser, address):
    """The links that a search finds, in order."""
    page = browser.new_page()

    def search(query):
        page.goto(f"{address}/search.html?q={query}")
        links = page.locator("#search-results li a")
        links.nth(3).wait_for()
        return links.all()

    yield search
    page.close()


@pytest.mark.parametrize("query", ["SHARE-05", "FMT-LEVEL-02", "law-18"])
def test_a_search_for_the_id_of_a_clause_lists_the_clause_first(search, query):
    clause = all_clauses()[query.upper()]
    (chapter,) = [each for each in spec() if clause in each.clauses]
    first = search(query)[0]
    title = f"{clause.id} · {clause.title}".replace("`", "")
    assert first.text_content() == f"{chapter.title} ({chapter.code}) > {title}"
    assert first.get_attribute("href").endswith(f"spec/{clause.path.stem}.html#{clause.id.lower()}")


def test_a_search_for_a_word_that_begins_ids_lists_pages_first(search):
    assert not [link for link in search("share")[:4] if "SHARE-" in link.text_content()]


def test_pictures_are_dark_in_the_dark_theme(open_page):
    for scheme, theme, filtered in (
        ("light", "auto", False),
        ("dark", "auto", True),
        ("dark", "light", False),
        ("light", "dark", True),
    ):
        page = open_page(SITE / "how/paged.html", scheme=scheme)
        page.evaluate("theme => { document.body.dataset.theme = theme }", theme)
        drawn = page.locator("img[src$='.svg']").first.evaluate("image => getComputedStyle(image).filter")
        assert (drawn != "none") == filtered, (scheme, theme)


@pytest.mark.parametrize("page", some_of("matrix/clauses/", "matrix/implementations/"))
def test_a_page_fits_and_is_quiet(open_page, page):
    opened = open_page(SITE / page, 1280)
    for width in (1280, 390, 360):
        opened.set_viewport_size({"width": width, "height": 800})
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)") == []


@pytest.mark.skipif(not AXE, reason="no axe-core here (AXE)")
@pytest.mark.parametrize(
    ("page", "scheme"),
    [(page, "light") for page in some_of("matrix/clauses/", "matrix/implementations/", "findings/", "spec/")]
    # The colors of the dark theme come from the theme, not from a page.
    + [(page, "dark") for page in some_of("matrix/clauses/", "matrix/implementations/", "findings/", "spec/", "how/")],
)
def test_a_page_can_be_read_by_everyone(open_page, page, scheme):
    opened = open_page(SITE / page, 1280, scheme)
    opened.add_script_tag(path=AXE)
    found = opened.evaluate("axe.run(document, {resultTypes: ['violations'], preload: false})")
    shown = [f"{each['id']}: {node['html'][:120]}" for each in found["violations"] for node in each["nodes"]]
    assert shown == []
