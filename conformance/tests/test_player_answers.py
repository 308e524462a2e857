"""Quiz answers in the player: they name each block's owner, also if a cache made another legal choice (nox -s browser)."""

import numpy as np
import pytest
from browser import PAGED, ROWS, call_trace, needs_site, written

from kvref_conformance.traces.json_codec import to_wire

pytestmark = [pytest.mark.browser, needs_site]

FOUR = PAGED | {"num_blocks": 4}
FORKED = [
    ("paged.create", {}, 0),
    ("paged.write", {"sequence": 0, "layer": 0, "start": 0, **ROWS}, None),
    ("paged.fork", {"sequence": 0}, 7),
]


def tables(player, lines, steps):
    """By step, the tables that are shown."""
    player.open(lines)
    shown = {}
    for step in steps:
        player.element.evaluate("(player, step) => player.go(step)", step)
        shown[step] = [row.locator(".kv-chip").all_text_contents() for row in player.element.locator(".kv-table").all()]
    return shown


def test_an_answer_is_so_whatever_was_thought(player, tmp_path):
    """A cache may copy a partial block when it is forked, and keep blocks past the end."""
    asked = [("paged.block_table", {"sequence": 0, "layer": 0}, [1]), ("paged.block_table", {"sequence": 7, "layer": 0}, [3])]
    after = [("paged.truncate", {"sequence": 7, "length": 0}, None), ("paged.block_table", {"sequence": 7, "layer": 0}, [3, 2])]
    path = written(tmp_path, *call_trace("paged.new", FOUR, *FORKED, *asked, *after))
    shown = tables(player, path, (4, 7, 8, 6))
    assert shown == {4: [["1"], ["1"]], 6: [["1"], ["3"]], 7: [["1"], []], 8: [["1"], ["3", "2"]]}
    assert player.element.locator(".kv-box", has_text="3 · B").locator(".kv-cell").all_text_contents() == ["A0", ""]


def test_each_answer_is_about_its_own_time(player, tmp_path):
    slots = {"sequence": 7, "layer": 0, "start": 0, "count": 1}
    writes = ("paged.write", {"sequence": 7, "layer": 0, "start": 0, **ROWS}, None)
    calls = [
        ("paged.slot_mapping", slots, [4]),
        writes,
        ("paged.slot_mapping", slots, [0]),
        ("paged.drop", {"sequence": 0}, None),
    ]
    path = written(tmp_path, *call_trace("paged.new", FOUR, *FORKED, *calls))
    shown = tables(player, path, (3, 5, 6, 8))
    assert shown == {3: [["2"]], 5: [["2"], ["2"]], 6: [["2"], ["0"]], 8: [["0"]]}


def test_a_block_that_was_released_leaves_its_place_in_the_table(player, tmp_path):
    rows = dict.fromkeys(("keys", "values"), to_wire(np.zeros((5, 1, 1), np.float32)))
    calls = [
        ("paged.create", {}, 0),
        ("paged.write", {"sequence": 0, "layer": 0, "start": 0, **rows}, None),
        ("paged.release_before", {"sequence": 0, "position": 3}, None),
        ("paged.fork", {"sequence": 0}, 7),
        ("paged.block_table", {"sequence": 7, "layer": 0}, [-1, 2, 3]),
        ("paged.block_tables", {"sequences": [0], "layer": 0}, to_wire(np.array([[-1, 2, 3, -1]], np.int32))),
        ("paged.drop", {"sequence": 0}, None),
    ]
    path = written(tmp_path, *call_trace("paged.new", FOUR, *calls))
    shown = tables(player, path, (3, 4, 5, 7, 8))
    left = ["-1", "2", "3"]
    assert shown == {3: [["?", "2", "3"]], 4: [left], 5: [left, left], 7: [left, left], 8: [left]}
    assert player.text("words") == "2 of 4 blocks free. B has 5 tokens in 2 blocks."


def test_who_was_refused_has_no_name(player, tmp_path):
    lines = call_trace("prefix.new", PAGED, ("prefix.begin", {"tokens": [1]}, 0), ("prefix.begin", {"tokens": [2]}, 1))
    lines[4] = {"id": 2, "error": {"kinds": ["OutOfBlocks"]}}
    player.open(written(tmp_path, *lines))
    player.button("To the end").click()
    assert player.text("call") == "A = prefix.begin(tokens=[2]) → 1"
    assert player.text("words") == "1 of 2 blocks free. A has 0 tokens in 1 block."


@pytest.mark.parametrize(("token", "found"), [(2**63 - 1, 1), (2**63 - 2, 0)])
def test_a_token_of_63_bits_is_no_other(player, tmp_path, token, found):
    rows = dict.fromkeys(("keys", "values"), to_wire(np.zeros((2, 1, 1), np.float32)))
    told = [2**63 - 1, 5]
    calls = [("prefix.begin", {"tokens": told}, 0), ("prefix.write", {"sequence": 0, "layer": 0, "start": 0, **rows}, None)]
    calls += [("prefix.commit", {"sequence": 0, "tokens": to_wire(np.array(told))}, None)]
    calls += [("prefix.match", {"tokens": [token, 5, 0]}, 2 * found)]
    player.open(written(tmp_path, *call_trace("prefix.new", PAGED, *calls)))
    player.button("To the end").click()
    assert player.element.locator(".kv-found").count() == found
    assert str(token) in player.text("call")
