"""Headless Chromium for the tests that need one: pages from disk, without a network, and nothing on the console."""

import os
import shutil

import pytest

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
    """Open a page; what it complains of, or asks the network for, fails the test."""
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
