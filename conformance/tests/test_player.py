"""The player in headless Chromium: what it draws is what the traces say, forward and back (nox -s browser)."""

import json
import random
from pathlib import Path

import pytest

import kvref
from kvref_conformance.trace.wire import to_wire

ROOT = Path(kvref.__file__).parents[1]
SITE = ROOT / "docs/_build/html"
VECTORS = sorted((ROOT / "conformance/vectors").glob("*/*.jsonl"))
ASKED = (Path(__file__).parent / "player_asked.js").read_text(encoding="utf-8")
TOLD = sorted((SITE / "_static/traces").glob("*.jsonl"))
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (SITE / "player.html").exists(), reason="the site is not built (nox -s docs)"),
]


@pytest.fixture
def player(open_page):
    return Player(open_page(SITE / "player.html"))


class Player:
    def __init__(self, page):
        self.page = page
        self.element = page.locator("kv-player")

    def open(self, path):
        self.page.set_input_files("input[type=file]", path)
        self.page.wait_for_function("document.querySelector('input[type=file]').files.length === 1")

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


def written(folder, *lines):
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


HEADER = {"trace": 1, "spec": "0.1.0", "clause": "any", "check": "a test", "judge": "model",
    "implementation": {"name": "x", "version": "1", "language": "python", "level": "exact"}}  # fmt: skip
NEW = {"id": 1, "op": "blocks.new", "args": {"num_blocks": 3}}
MADE = {"id": 1, "ok": {"handle": 1}}


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
    for family in ("paged", "blocks", "contiguous", "quantized", "tiered", "buffers", "pooled"):
        assert asked[family] > 20, family


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
    assert tables.locator(".kv-chip").all_text_contents() == ["4", "1"]
    assert player.text("words") == "2 of 6 blocks free. B has 4 tokens in 2 blocks; C has 3 tokens in 2 blocks."


def test_a_failure_is_shown_where_it_parts(player):
    path = SITE / "_static/traces/tiered-wraps-one-early.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    player.open(path)
    assert player.step == (3, 3)
    failure = player.text("failure")
    assert failure.startswith(f"Here they part (TIER-03, line {len(lines)})")
    assert player.text("expected") == f"expected{lines[0]['failed']['expected']}"
    assert player.text("got") == f"got{lines[0]['failed']['got']}"
    player.element.get_by_text("The numbers of this call").evaluate("summary => { summary.parentElement.open = true }")
    assert player.element.locator("td.kv-wrong").all_text_contents() == ["2", "4"]  # keys 1, 2 and values 3, 4 were written
    player.button("One step back").click()
    assert player.text("failure") == ""
    player.element.get_by_role("button", name="here they part").click()
    assert player.step == (3, 3)


REFUSED = {
    "empty": ([""], "The file is empty"),
    "prose": (["Dear diary,"], "Line 1: not JSON: Dear diary,"),
    "no header": ([NEW, MADE], 'Line 1: expected a header, {"trace": 1, ...}, got {"id": 1'),
    "another version": ([HEADER | {"trace": 2}, NEW, MADE], "Line 1: a trace of version 2; this player reads version 1."),
    "no calls": ([HEADER], "Line 2: the trace has a header and no conversation."),
    "no reply": ([HEADER, NEW], "Line 2: the trace ends with a request that has no reply."),
    "another reply": ([HEADER, NEW, MADE | {"id": 2}], "Line 3: expected the reply to request 1, got"),
    "a list": ([HEADER, "[1, 2]", MADE], "Line 2: expected an object, got [1, 2]"),
    "no op": ([HEADER, {"id": 1, "args": {}}, MADE], "Line 2: expected a request, with an op FAMILY.NAME"),
    "an id of text": ([HEADER, NEW | {"id": "one"}, MADE], 'Line 2: expected an id, counted from 1, got "one"'),
    "no args": ([HEADER, {"id": 1, "op": "blocks.new"}, MADE], "Line 2: expected args by name, got nothing"),
    "on nothing": ([HEADER, NEW, MADE, {"id": 2, "op": "blocks.allocate", "on": 7, "args": {}}, {"id": 2, "ok": 0}],
        "Line 4: expected the id of an earlier request as on, got 7"),
    "a short array": ([HEADER, NEW | {"args": {"x": {"dtype": "float32", "shape": [2], "base64": "AAAAAA=="}}}, MADE],
        "Line 2: float32 [2] needs 8 bytes, got 4 bytes"),
    "a dtype": ([HEADER, NEW | {"args": {"x": {"dtype": "float8", "shape": [2], "base64": "AAAA"}}}, MADE],
        'Line 2: no dtype "float8"'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_trace_is_refused_and_what_was_shown_stays(player, tmp_path, name):
    lines, said = REFUSED[name]
    before, step = player.picture, player.step
    player.open(written(tmp_path, *lines))
    alert = player.element.get_by_role("alert")
    alert.filter(has_text=said).wait_for()
    assert alert.text_content().startswith(f"trace.jsonl: {said}")
    assert (player.picture, player.step) == (before, step)
    player.button("One step forward").click()
    assert player.step[0] == step[0] + 1


def test_what_a_trace_says_is_never_run(player, tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    header = HEADER | {"check": evil, "failed": {"what": evil, "expected": evil, "got": evil}}
    request = {"id": 2, "op": "blocks.free", "on": 1, "args": {"block": evil}, "note": evil}
    player.open(
        written(tmp_path, header, NEW, MADE, request, {"id": 2, "error": {"kind": evil}, "got": {"error": {"message": evil}}})
    )
    assert player.text("note") == evil
    assert evil in player.text("failure")
    assert player.element.locator("img").count() == 0


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


def test_it_plays_and_pauses(player):
    player.button("To the start").click()
    player.element.evaluate("player => { player.time = () => 30 }")
    player.button("Play").click()
    player.button("Pause").wait_for()
    player.page.wait_for_function("document.querySelector('.kv-count').textContent.startsWith('5 ')")
    player.button("Pause").click()
    stopped = player.step
    player.page.wait_for_timeout(200)
    assert player.step == stopped
    player.button("Play").click()
    player.page.wait_for_function("document.querySelector('.kv-count').textContent === '19 / 19'")
    player.button("Play").wait_for()  # it stopped by itself


def test_a_screen_reader_hears_each_step(player):
    player.button("To the end").click()
    slider = player.element.get_by_role("slider", name="Step")
    assert slider.get_attribute("aria-valuetext") == "19 of 19: paged.gather"
    assert player.element.get_by_role("img").get_attribute("aria-label") == player.text("words")
    for live in ("live", "words"):
        assert player.element.locator(f".kv-{live}").get_attribute("aria-live") == "polite"
    assert player.element.get_attribute("aria-label") == "Player: Two sequences, six blocks, and a block handed on"


def test_a_trace_of_fifty_thousand_lines_can_be_walked(player, tmp_path):
    """Bounds are wide: a machine may be slow. What they keep out is work that grows with the trace at every step."""
    lines, ids, draw = [HEADER], iter(range(1, 10**6)), random.Random(0)

    def say(op, reply, **args):
        number = next(ids)
        lines.extend(({"id": number, "op": op, **({"on": 1} if number > 1 else {}), "args": args}, {"id": number, "ok": reply}))
        return number

    config = {"block_size": 16, "num_layers": 2, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
    say("paged.new", {"handle": 1}, num_blocks=2000, **config)
    tokens = to_wire(kvref.reference.zeros((8, 1, 1), "float32"))
    live = [{"reply": say("paged.create", name)} for name in range(8)]
    for name in range(8, 6000):
        if len(lines) > 50_000:
            break
        for sequence in live:
            say("paged.append", None, sequences=list(live), layer=0, keys=tokens, values=tokens)
            say("paged.append", None, sequences=list(live), layer=1, keys=tokens, values=tokens)
            say("paged.length", 1, sequence=sequence, layer=0)
        say("paged.drop", None, sequence=live.pop(draw.randrange(8)))
        live.append({"reply": say("paged.create", name)})
    player.open(written(tmp_path, *lines))
    player.page.wait_for_function(
        f"document.querySelector('.kv-count').textContent.endsWith('{len(lines) // 2}')", timeout=20_000
    )
    longest = player.element.evaluate(
        """player => Math.max(...[0.99, 0.01, 0.5, 0.75, 1, 0.25, 0].map((part) => {
          const start = performance.now();
          player.go(Math.round(part * player.trace.exchanges.length));
          return performance.now() - start;
        }))"""
    )
    again = player.element.evaluate(
        """player => Math.max(...Array.from({ length: 40 }, (_, index) => {
          const start = performance.now();
          player.go(12000 + index);
          return performance.now() - start;
        }))"""
    )
    print(f"{len(lines)} lines: longest jump {longest:.0f} ms, longest step {again:.0f} ms")
    assert longest < 20_000
    assert again < 2_000
