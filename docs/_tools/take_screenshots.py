"""Screenshots of the built site for the README: `python docs/_tools/take_screenshots.py`, with playwright and Chromium."""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1]
SITE, SCREENSHOTS = DOCS / "_build/html", DOCS / "_static/readme"
REUSED_BLOCK_STEP = 16  # the step of the trace `paged` at which a new sequence has allocated a block that another sequence freed

if __name__ == "__main__":
    SCREENSHOTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1240, "height": 900}, device_scale_factor=1.5)
        page.goto((SITE / "matrix/index.html").as_uri())
        page.locator(".scroll").screenshot(path=SCREENSHOTS / "matrix.png")
        page.goto((SITE / "how/paged.html").as_uri())
        player = page.locator("kv-player")
        player.evaluate("(player, step) => player.go(step)", REUSED_BLOCK_STEP)
        player.screenshot(path=SCREENSHOTS / "player.png")
        browser.close()
