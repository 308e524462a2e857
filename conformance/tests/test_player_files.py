"""Files opened in the player: invalid traces are rejected, undrawable ones are reported, and long ones can be stepped through."""

import base64
import random

import ml_dtypes
import numpy as np
import pytest
from browser import HEADER, MADE, NEW, PAGED, ROWS, SITE, TOKEN, call_trace, needs_site, written

import kvref
from kvref_conformance.traces.json_codec import to_wire

pytestmark = [pytest.mark.browser, needs_site]


FREE = {"id": 2, "op": "blocks.free", "on": 1, "args": {"block": 0}}
REFUSED = {
    "empty": ([""], "The file is empty"),
    "prose": (["Dear diary,"], "Line 1: not JSON: Dear diary,"),
    "no header": ([NEW, MADE], 'Line 1: expected a header, {"trace": 1, ...}, got {"id": 1'),
    "another version": ([HEADER | {"trace": 2}, NEW, MADE], "Line 1: a trace of version 2; this player reads version 1."),
    "no calls": ([HEADER], "Line 2: the trace has a header but no calls."),
    "no reply": ([HEADER, NEW], "Line 2: the trace ends with a request that has no reply."),
    "another reply": ([HEADER, NEW, MADE | {"id": 2}], "Line 3: expected the reply to request 1, got"),
    "a list": ([HEADER, "[1, 2]", MADE], "Line 2: expected an object, got [1, 2]"),
    "no op": ([HEADER, {"id": 1, "args": {}}, MADE], "Line 2: expected a request, with an op FAMILY.NAME"),
    "an id of text": ([HEADER, NEW | {"id": "one"}, MADE], 'Line 2: expected an id, counted from 1, got "one"'),
    "no args": ([HEADER, {"id": 1, "op": "blocks.new"}, MADE], "Line 2: expected args by name, got nothing"),
    "on nothing": ([HEADER, NEW, MADE, {"id": 2, "op": "blocks.allocate", "on": 7, "args": {}}, {"id": 2, "ok": 0}],
        "Line 4: expected the id of an earlier request as on, got 7"),
    "an id again": ([HEADER, NEW, MADE, NEW, MADE], "Line 4: expected an id not used before, got 1"),
    "a later reply": ([HEADER, NEW, MADE, FREE | {"args": {"block": {"reply": 3}}}, {"id": 2, "ok": None}],
        'Line 4: expected a reference to an earlier request, got {"reply":3}'),
    "an error of text": ([HEADER, NEW, {"id": 1, "error": "no"}], 'Line 3: expected an error with its kind, got "no"'),
    "a kind of two": ([HEADER, NEW, {"id": 1, "ok": 1, "got": {"error": {"kinds": [1, 2]}}}],
        'Line 3: expected an error with its kind, got {"kinds":[1,2]}'),
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
    assert player.element.get_by_role("alert").text_content().startswith(f"trace.jsonl: {said}")
    assert (player.picture, player.step) == (before, step)
    player.button("One step forward").click()
    assert player.step[0] == step[0] + 1
    player.open(written(tmp_path, HEADER, NEW, MADE))
    assert player.text("trouble") == ""
    assert player.step == (1, 1)


POOLED = {"tokens_per_block": 0, "max_tokens": 8, "num_kv_heads": 1, "head_dim": 1}


UNDRAWN = {
    "a billion blocks": call_trace("blocks.new", {"num_blocks": 10**9}, ("blocks.num_free", {}, 10**9)),
    "blocks of no token": call_trace("pooled.new", POOLED, ("pooled.append", ROWS, None)),
    "no sequences": call_trace("paged.new", PAGED, ("paged.append", {"layer": 0, **ROWS}, None)),
}


@pytest.mark.parametrize("name", UNDRAWN)
def test_what_cannot_be_drawn_is_said(player, tmp_path, name):
    player.open(written(tmp_path, *UNDRAWN[name]))
    player.button("To the end").click()
    assert player.text("words") == "No picture: a call up to here has arguments that cannot be drawn."
    assert player.step == (2, 2)
    player.button("To the start").click()
    assert player.text("words") == ""


def test_a_block_that_nobody_named_has_nothing_in_it_for_its_next_owner(player, tmp_path):
    lines = call_trace(
        "paged.new",
        PAGED,
        ("paged.create", {}, 0),
        ("paged.write", {"sequence": 0, "layer": 0, "start": 0, **ROWS}, None),
        ("paged.drop", {"sequence": 0}, None),
        ("paged.create", {}, 1),
        ("paged.ensure_capacity", {"sequence": 1, "num_tokens": 1}, None),
    )
    player.open(written(tmp_path, *lines))
    shown = {}
    for step in (3, 6):
        player.element.evaluate("(player, step) => player.go(step)", step)
        shown[step] = player.element.locator(".kv-box :is(.kv-name, .kv-cell)").all_text_contents()
    assert shown == {3: ["? · A", "A0", ""], 6: ["? · B", "", ""]}


def test_blocks_taken_at_once_are_drawn_and_a_number_may_have_a_type(player, tmp_path):
    two = {"dtype": "int8", "shape": [], "base64": "Ag=="}
    calls = ("blocks.allocate_many", {"count": two}, [2, 0]), ("blocks.free", {"block": two}, None)
    player.open(written(tmp_path, *call_trace("blocks.new", {"num_blocks": 3}, *calls)))
    player.button("To the end").click()
    assert player.text("words") == "2 of 3 blocks free, 1 allocated: 0."


def test_attention_reads_what_its_layer_has(player, tmp_path):
    config = {"num_layers": 2, "capacity": 4, "num_kv_heads": 1, "head_dim": 1, "format": "int8"}
    rows = TOKEN | {"shape": [2, 1, 1], "base64": "AAAAAAAAAAA="}
    step = ("quantized.append_step", {"keys": rows, "values": rows}, None)
    player.open(written(tmp_path, *call_trace("quantized.new", config, step, step, ("quantized.attend", {"layer": 1}, TOKEN))))
    player.button("To the end").click()
    assert player.element.locator(".kv-box").nth(0).locator(".kv-read").count() == 0
    assert player.element.locator(".kv-box").nth(1).locator(".kv-read").all_text_contents() == ["0", "1"]


def test_a_file_can_be_dropped(player, tmp_path):
    text = written(tmp_path, HEADER, NEW, MADE).read_text()
    data = player.page.evaluate_handle(
        "text => { const data = new DataTransfer(); data.items.add(new File([text], 'dropped.jsonl')); return data }", text
    )
    player.element.dispatch_event("drop", {"dataTransfer": data})
    player.page.wait_for_function("document.querySelector('.kv-count').textContent === '1 / 1'")
    # a drop without a file
    player.element.dispatch_event("drop", {"dataTransfer": player.page.evaluate_handle("new DataTransfer()")})
    assert player.step == (1, 1)


def test_a_file_too_large_is_not_read(player):
    player.element.evaluate(
        "player => player.open({ name: 'big.jsonl', size: 2 ** 28 + 1, text: () => { throw new Error('it was read') } })"
    )
    assert player.text("trouble") == "big.jsonl: larger than 256 MiB"


def test_where_there_is_nothing_to_draw_the_numbers_are_shown(open_page):
    page = open_page(SITE / "how/bugs.html")
    player = page.locator("kv-player").last  # attention has no state
    values = player.locator("details", has_text="The numbers of this call")
    assert not player.locator(".kv-picture").is_visible()
    assert values.get_attribute("open") == ""


FLOATS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("name", FLOATS)
def test_every_number_of_sixteen_bits_is_read_right(player, name):
    values = np.arange(2**16, dtype=np.uint16).view(FLOATS[name])
    array = {"dtype": name, "shape": [2**16], "base64": base64.b64encode(values.tobytes()).decode()}
    read = player.page.evaluate("array => Array.from(new Uint32Array(Float32Array.from(kvref.numbers(array)).buffer))", array)
    read = np.array(read, np.uint32).view(np.float32)
    assert np.array_equal(read, values.astype(np.float32), equal_nan=True)
    assert np.array_equal(np.signbit(read[~np.isnan(read)]), np.signbit(values[~np.isnan(values)]))


def test_a_number_is_as_short_as_its_dtype_allows(player):
    values = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    values[:5] = [0.1, -0.0, 1e-42, np.inf, 3e38]
    array = to_wire(values)
    said = player.page.evaluate("array => kvref.numbers(array).map((number) => kvref.short(number, array.dtype))", array)
    assert said[:4] == ["0.1", "-0", "1e-42", "inf"]
    for words, value in zip(said, values, strict=True):
        assert np.float32(words) == value
        assert digits(words) <= digits(np.format_float_scientific(value))  # NumPy's representation is the shortest


def digits(text):
    return len(text.partition("e")[0].replace(".", "").strip("-0"))


def test_of_many_objects_the_one_spoken_to_is_shown(player, tmp_path):
    lines = []
    for number in (1, 2, 3, 4):
        lines += [NEW | {"id": number}, {"id": number, "ok": {"handle": number}}]
    player.open(written(tmp_path, HEADER, *lines, FREE | {"id": 5, "on": 2}, {"id": 5, "ok": None}))
    shown = {}
    for step in (3, 4, 5):
        player.element.evaluate("(player, step) => player.go(step)", step)
        shown[step] = player.element.locator(".kv-title").all_text_contents()
    assert shown == {3: ["blocks", "blocks2", "blocks3"], 4: ["blocks4"], 5: ["blocks2"]}


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


def test_a_trace_of_fifty_thousand_lines_can_be_walked(player, tmp_path):
    """The time limits are generous for slow machines; they exclude work per step that grows with the length of the trace."""
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
    assert player.step == (1, len(lines) // 2)
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
    jumped, afresh = player.element.evaluate(
        """player => {
          const steps = [25000, 300, 700, 260, 24000, 600], pictures = () => steps.map((step) => {
            player.go(step);
            return player.picture.outerHTML;
          });
          const jumped = pictures();
          player.worlds = new Proxy({}, { get: () => (step) => new window.kvref.Worlds(player.trace).at(step) });
          return [jumped, pictures()];
        }"""
    )
    assert jumped == afresh
    player.element.evaluate("player => player.go(1)")
    assert player.element.locator(".kv-bar").count() == 512  # otherwise 32,000 cells
    assert player.text("more") == "and 1488 more, not drawn"
    print(f"{len(lines)} lines: longest jump {longest:.0f} ms, longest step {again:.0f} ms")
    assert longest < 20_000
    assert again < 2_000
