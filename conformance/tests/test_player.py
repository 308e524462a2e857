"""The player in headless Chromium: its drawings match the traces, forward and backward (nox -s browser)."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from browser import ROOT, SITE, needs_site

VECTORS = sorted((ROOT / "conformance/vectors").glob("*/*.jsonl"))
ASKED = (Path(__file__).parent / "player_asked.js").read_text(encoding="utf-8")
TOLD = sorted((SITE / "_static/traces").glob("*.jsonl"))
pytestmark = [pytest.mark.browser, needs_site]


@pytest.mark.parametrize("path", TOLD, ids=lambda path: path.stem)
def test_forward_and_back_is_the_same_picture(player, path):
    player.open(path)
    player.button("To the start").click()
    pictures = [player.picture]
    for _ in range(player.step[1]):
        player.button("One step forward").click()
        pictures.append(player.picture)
    assert len(pictures) == (len(path.read_text().splitlines()) - 1) // 2 + 1
    assert "attention" in path.stem or len(set(pictures)) > len(pictures) // 2
    for picture in reversed(pictures[:-1]):
        player.button("One step back").click()
        assert player.picture == picture
    assert player.step[0] == 0


def test_what_is_drawn_is_what_the_caches_answered(player):
    asked = {}
    for path in [*VECTORS, *TOLD]:
        found = player.page.evaluate(ASKED, [path.read_text(encoding="utf-8")])
        assert found["wrong"] == [], path.name
        family = path.stem.rpartition("-")[2] if path.parent.name == "checks" else path.stem.partition("-")[0]
        asked[family] = asked.get(family, 0) + found["asked"]
    for family in (
        "paged",
        "prefix",
        "blocks",
        "contiguous",
        "quantized",
        "tiered",
        "buffers",
        "pooled",
        "engine",
        "tree",
        "ragged",
        "pruned",
    ):
        assert asked[family] > 20, family


def test_every_step_of_a_trace_is_drawn(player):
    for path in [*VECTORS[::4], *TOLD]:
        words = player.element.evaluate(
            """(player, text) => {
              player.load(text, "a trace");
              return [player.trouble.textContent, ...player.trace.exchanges.map((_, index) => {
                player.go(index + 1);
                return player.words.textContent;
              })];
            }""",
            path.read_text(encoding="utf-8"),
        )
        assert words[0] == "", path.name
        assert not any(said.startswith("No picture") for said in words), path.name


WORDS = {
    ("contiguous", 5): "7 tokens, room for 8, at most 8.",
    ("quantized", 8): "Layer 0 has 2 of 4 tokens; Layer 1 has 2 of 4 tokens.",
    ("tiered", 4): "4 tokens; tail: 1 to 3, warm: 0.",
    ("tiered", 9): "10 tokens; tail: 9 to 11, warm: 6 to 8, store: 2 to 5; 2 evicted.",
    ("recurrent", 10): "2 of 5 blocks free. A has the state of 6 tokens, and can be truncated to 0, 2, 4 and 5.",
    ("tree", 5): "A has 2 tokens and a tree with the paths 0–2, 1–3 and 1–4.",
    ("ragged", 7): "Rows of 4 tokens, 3 tokens, 4 tokens, 2 tokens and 0 tokens.",
    ("pruned", 4): "8 tokens, of which each head stores 4.",
    ("pooled", 7): "buffers: 1 buffer in use; free: 1 of 1 KiB. pooled: 3 tokens in 2 blocks; the oldest 2 were evicted.",
}


@pytest.mark.parametrize(("story", "step"), WORDS)
def test_a_state_is_said_in_words(player, story, step):
    player.open(SITE / f"_static/traces/{story}.jsonl")
    player.element.evaluate("(player, step) => player.go(step)", step)
    assert player.text("words") == WORDS[story, step]


def test_a_freed_block_is_handed_on_with_what_was_in_it(player):
    player.open(SITE / "_static/traces/paged.jsonl")
    player.element.evaluate("player => player.go(13)")  # A is dropped
    names = player.element.locator(".kv-box .kv-name").all_text_contents()
    assert names == ["0 · free", "1 · free", "2 · B", "3 · B", "4 · free", "5 · free"]
    player.button("To the end").click()
    block = player.element.locator(".kv-box", has_text="1 · C")
    assert block.locator(".kv-cell").all_text_contents() == ["C2", "A3"]
    assert "kv-stale" in block.locator(".kv-cell").nth(1).get_attribute("class")
    tables = player.element.locator(".kv-table", has_text="table of C")
    assert tables.locator(".kv-chip").all_text_contents() == ["0", "1"]
    assert player.text("words") == "2 of 6 blocks free. B has 4 tokens in 2 blocks; C has 3 tokens in 2 blocks."


def test_a_block_that_nobody_named_is_drawn_without_its_number(player):
    player.open(SITE / "_static/traces/paged-reads-past-the-length.jsonl")
    names = player.element.locator(".kv-box .kv-name").all_text_contents()
    assert names == ["? · A"] * 3
    assert player.text("more") == "and 21 free blocks with unknown numbers"
    assert player.element.locator(".kv-chip").all_text_contents() == ["?"] * 3
    player.element.evaluate("player => player.go(2)")  # before it allocated any
    assert player.element.locator(".kv-box .kv-name").all_text_contents() == [f"{block} · free" for block in range(24)]


def boxes(player):
    """By block: its owner, and its contents."""
    found = {}
    for box in player.element.locator(".kv-box").all():
        number, _, whose = box.locator(".kv-name").text_content().partition(" · ")
        found[number] = whose, *box.locator(".kv-cell").all_text_contents()
    return found


def test_a_shared_block_is_seen_and_so_is_its_copy(player):
    player.open(SITE / "_static/traces/sharing.jsonl")
    player.element.evaluate("player => player.go(5)")  # B is forked
    assert boxes(player)["1"] == ("A, B · ×2", "A2", "")
    assert player.element.locator(".kv-shared").count() == 2
    assert player.text("words").endswith("B has 3 tokens in 2 blocks. 2 blocks shared.")
    player.element.evaluate("player => player.go(7)")  # B is written to
    assert boxes(player)["1"] == ("A", "A2", "")
    assert boxes(player)["2"] == ("B", "A2", "B3")
    assert player.element.locator(".kv-taken .kv-name").all_text_contents() == ["2 · B"]
    assert player.element.locator(".kv-moved").all_text_contents() == ["A2"]
    player.element.evaluate("player => player.go(11)")  # of three sequences that share the first block, C writes to it
    assert boxes(player)["0"] == ("A, B · ×2", "A0", "A1")
    assert player.element.locator(".kv-taken :is(.kv-name, .kv-cell)").all_text_contents() == ["3 · C", "A0", "C1"]
    player.element.evaluate("player => player.go(18)")  # no free block for a copy
    assert player.text("call").endswith("→ OutOfBlocks")
    assert player.text("words").startswith("0 of 6 blocks free.")


def test_what_was_taken_back_is_stale_and_what_moved_up_has_its_new_place(player):
    player.open(SITE / "_static/traces/truncation.jsonl")
    player.element.evaluate("player => player.go(7)")  # A is truncated to six tokens
    assert boxes(player)["3"] == ("free", "A6", "A7")
    assert player.text("words") == "5 of 8 blocks free. A has 6 tokens in 3 blocks."
    player.element.evaluate("player => player.go(14)")  # and two of them are removed
    assert player.element.locator(".kv-table", has_text="table of A").locator(".kv-chip").all_text_contents() == ["4", "1"]
    assert boxes(player)["4"] == ("A", "A0", "A1")
    assert boxes(player)["0"] == ("B", "A0", "A1")
    assert player.element.locator(".kv-moved").all_text_contents() == ["A2", "A3", "A0", "A1"]


def test_blocks_that_wait_to_be_found_are_seen_until_they_are_taken(player):
    player.open(SITE / "_static/traces/prefixes.jsonl")
    player.element.evaluate("player => player.go(10)")  # B begins with A's prefix
    assert boxes(player)["0"] == ("A, B · ×2 · cached", "A0", "A1")
    assert player.element.locator(".kv-found .kv-name").all_text_contents() == [
        "0 · A, B · ×2 · cached",
        "1 · A, B · ×2 · cached",
    ]
    player.element.evaluate("player => player.go(16)")  # both are dropped
    assert player.element.locator(".kv-waiting .kv-name").all_text_contents() == [f"{n} · cached, evictable" for n in (0, 1, 3)]
    assert player.text("words") == "6 of 6 blocks free, 3 of them cached. No sequence."
    player.element.evaluate("player => player.go(19)")  # C allocates one of them
    assert boxes(player)["3"] == ("C", "B4", "B5")
    assert player.text("words").startswith("2 of 6 blocks free, 2 of them cached.")
    player.button("To the end").click()
    assert boxes(player)["0"] == ("cached, evictable", "A0", "A1")  # D wrote to a copy of it
    assert boxes(player)["4"][1:] == ("D0", "A1")


def slots(player):
    """The ring and its sink tokens: positions by slot, stale slots, and the slot of the next token."""
    cells = player.element.locator(".kv-cell")
    stale = player.element.locator(".kv-stale").all_text_contents()
    return cells.all_text_contents(), stale, player.element.locator(".kv-picture .kv-quiet").text_content()


def test_a_ring_turns_and_goes_back(player):
    player.open(SITE / "_static/traces/windows.jsonl")
    player.element.evaluate("player => player.go(5)")  # the ring is full
    assert slots(player) == ([*"01234567"], [], "The slot of the next token, 8, is 2.")
    player.element.evaluate("player => player.go(6)")  # and overwrites its oldest token
    assert slots(player)[0] == [*"01834567"]
    assert player.text("words") == (
        "9 tokens, of which 0 to 1 and 3 to 8 are stored. The next query, at 9, sees 0 to 1, 6 to 8 and itself."
    )
    player.element.evaluate("player => player.go(9)")  # a draft of two tokens was truncated
    assert slots(player) == (["0", "1", "8", "9", "10", "5", "6", "7"], ["9", "10"], "The slot of the next token, 9, is 3.")
    player.element.evaluate("player => player.go(13)")  # a step longer than the ring
    assert slots(player)[0] == ["0", "1", "14", "15", "16", "17", "12", "13"]
    assert player.element.locator(".kv-read").all_text_contents() == ["0", "1"]


def numbers(arrays):
    return [number for array in arrays for number in np.frombuffer(base64.b64decode(array["base64"]), "<f4").tolist()]


def test_a_failure_is_shown_where_it_parts(player):
    path = SITE / "_static/traces/tiered-wraps-one-early.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    calls, want, got = len(lines) // 2, numbers(lines[-1]["ok"]), numbers(lines[-1]["got"]["ok"])
    player.open(path)
    assert player.step == (calls, calls)
    assert player.text("heading").startswith(f"TIER-03 · {lines[0]['check']} zoo:tiered-wraps-one-early")
    assert player.element.get_attribute("aria-label") == f"Player: TIER-03 · {lines[0]['check']}"
    failure = player.text("failure")
    assert failure.startswith(f"First mismatch (TIER-03, line {len(lines)})")
    assert player.text("expected") == f"expected{lines[0]['failed']['expected']}"
    assert player.text("got") == f"got{lines[0]['failed']['got']}"
    player.element.get_by_text("The numbers of this call").evaluate("summary => { summary.parentElement.open = true }")
    wrong = [np.float32(word) for word in player.element.locator("td.kv-wrong").all_text_contents()]
    assert wrong == [np.float32(b) for a, b in zip(want, got, strict=True) if a != b]
    player.button("One step back").click()
    assert player.text("failure") == ""
    player.element.get_by_role("button", name="first mismatch").click()
    assert player.step == (calls, calls)


def test_the_keyboard_is_enough(player):
    player.button("To the start").click()
    for key, step in {"ArrowRight": 1, "PageDown": 11, "ArrowLeft": 10, "End": 19, "PageUp": 9, "Home": 0}.items():
        player.page.keyboard.press(key)
        assert player.step[0] == step, key
    player.page.keyboard.press("Tab")
    player.page.keyboard.press("Tab")
    player.page.keyboard.press("Tab")
    player.page.keyboard.press("Enter")
    assert player.step[0] == 1
    player.element.locator("input[type=range]").focus()
    player.page.keyboard.press("ArrowRight")
    assert player.step[0] == 2


def test_the_slider_is_dragged(player):
    box = player.element.locator("input[type=range]").bounding_box()
    middle, mouse = box["y"] + box["height"] / 2, player.page.mouse
    mouse.move(box["x"] + 5, middle)
    mouse.down()
    steps = []
    for part in (0.3, 0.6, 1.0, 0.5):
        mouse.move(box["x"] + part * box["width"], middle)
        steps.append(player.step[0])
    mouse.up()
    assert 0 < steps[0] < steps[1] < steps[2] == 19
    assert steps[3] in (9, 10)


PAUSES = {
    "button": lambda player: player.button("Pause").click(),
    "key": lambda player: player.element.locator("input[type=range]").press("ArrowRight"),
    "slider": lambda player: player.element.locator("input[type=range]").fill("7"),
    "call": lambda player: player.element.locator("button.kv-step").first.click(),
    "file": lambda player: player.open(SITE / "_static/traces/contiguous.jsonl"),
}


@pytest.mark.parametrize("way", PAUSES)
def test_it_plays_until_told_otherwise(player, way):
    player.button("To the start").click()
    player.element.evaluate("player => { player.time = () => 200 }")
    player.button("Play").click()
    player.page.wait_for_function("parseInt(document.querySelector('.kv-count').textContent) >= 5")
    PAUSES[way](player)
    player.button("Play").wait_for()
    stopped = player.step
    assert stopped[0] < stopped[1]  # it would stop by itself at the end
    player.page.wait_for_timeout(600)
    assert player.step == stopped


def test_it_plays_to_the_end_and_from_there_again(player):
    player.button("To the end").click()
    player.element.evaluate(
        """player => {
          player.time = () => 30;
          player.gone = [];
          player.go = (step) => player.gone.push(step) && Object.getPrototypeOf(player).go.call(player, step);
        }"""
    )
    player.button("Play").click()
    player.button("Play").wait_for()  # it stopped by itself
    assert player.element.evaluate("player => player.gone") == list(range(20))


def test_a_screen_reader_hears_each_step(player):
    player.button("To the end").click()
    slider = player.element.get_by_role("slider", name="Step")
    assert slider.get_attribute("aria-valuetext") == "19 of 19: paged.gather"
    assert player.element.get_by_role("img").get_attribute("aria-label") == player.text("words")
    for live in ("live", "words"):
        assert player.element.locator(f".kv-{live}").get_attribute("aria-live") == "polite"
    assert player.element.get_attribute("aria-label") == "Player: Two sequences, six blocks, and a block handed on"
