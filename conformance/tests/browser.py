"""Helpers for tests in headless Chromium: pages from disk without a network or console messages, the player, and trace files."""

import json
import os
import shutil
from pathlib import Path

import pytest

import kvref

ROOT = Path(kvref.__file__).parents[1]
SITE = ROOT / "docs/_build/html"
needs_site = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built (nox -s docs)")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (nox -s browser)")
    if CHROMIUM is None:
        pytest.skip("no chromium here (apt install chromium)")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """Open a page. Any console message or network request fails the test."""
    contexts, trouble = [], []

    def open_page(path, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on(
            "request", lambda request: trouble.append(request.url) if not request.url.startswith(("file:", "data:")) else None
        )
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


@pytest.fixture
def player(open_page):
    return Player(open_page(SITE / "player.html"))


class Player:
    """The player of a page, with the actions of a user."""

    def __init__(self, page):
        self.page = page
        self.element = page.locator("kv-player")

    def open(self, path):
        """Choose the file and wait until it is loaded."""
        self.element.evaluate(
            """player => {
              player.opened = false;
              player.load = (...given) => {
                Object.getPrototypeOf(player).load.apply(player, given);
                player.opened = true;
              };
            }"""
        )
        with self.page.expect_file_chooser() as chosen:
            self.page.locator("input[type=file]").click()
        chosen.value.set_files(path)
        self.page.wait_for_function("document.querySelector('kv-player').opened")

    def button(self, name):
        return self.element.get_by_role("button", name=name, exact=True)

    def text(self, part):
        return self.element.locator(f".kv-{part}").text_content()

    @property
    def picture(self):
        return self.element.locator(".kv-picture").evaluate("picture => picture.outerHTML")

    @property
    def step(self):
        step, _, steps = self.text("count").partition(" / ")
        return int(step), int(steps)


HEADER = {"trace": 1, "spec": "0.1.0", "clause": "any", "check": "a test", "judge": "model",
    "implementation": {"name": "x", "version": "1", "language": "python", "level": "exact"}}  # fmt: skip
NEW = {"id": 1, "op": "blocks.new", "args": {"num_blocks": 3}}
MADE = {"id": 1, "ok": {"handle": 1}}
PAGED = {"num_blocks": 2, "block_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
TOKEN = {"dtype": "float32", "shape": [1, 1, 1], "base64": "AAAAAA=="}
ROWS = {"keys": TOKEN, "values": TOKEN}


def written(folder, *lines):
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def call_trace(op, config, *calls):
    """The lines of a trace: an object that the first operation creates, then calls (operation, arguments, result) on it."""
    lines = [HEADER, NEW | {"op": op, "args": config}, MADE]
    for id, (op, args, ok) in enumerate(calls, 2):
        lines += [{"id": id, "op": op, "on": 1, "args": args}, {"id": id, "ok": ok}]
    return lines
