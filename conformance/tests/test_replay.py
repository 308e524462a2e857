"""`kvref replay`: every call is shown, and nothing counts as right without a call."""

import json

import pytest
from commandline import run_kvref

from kvref_conformance.runner.check_runner import MAX_SHOWN_CALLS, shorten_calls

MINE = """
import kvref
from kvref_conformance.implementations.backends import OnBackend

class Mine(OnBackend):
    name = "mine"
    def __init__(self):
        super().__init__(kvref.reference)

class NoFree(Mine):
    def blocks(self, num_blocks):
        pool = kvref.BlockPool(num_blocks)
        class Without:
            num_blocks, num_free = pool.num_blocks, property(lambda self: pool.num_free)
            allocate = staticmethod(pool.allocate)
        return Without()

class NotThisSize(Mine):
    def blocks(self, num_blocks):
        class NotOffered(Exception): pass
        raise NotOffered("fewer than a thousand blocks")

class LosesTheTenth(Mine):
    def blocks(self, num_blocks):
        class Pool(kvref.BlockPool):
            freed = 0
            def free(self, block):
                self.freed += 1
                if self.freed != 10:
                    super().free(block)
        return Pool(num_blocks)
"""


@pytest.fixture
def kvref(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)

    def run(*arguments):
        return run_kvref(*arguments, folder=tmp_path)

    return run


def written(path, requests, judge="model", clause="BLOCK-05", check="any sequence of calls (blocks)"):
    who = {"name": "x", "version": "1", "language": "python", "level": "exact", "load": "mine:Mine"}
    lines = [{"trace": 1, "spec": "0.1.0", "clause": clause, "check": check, "judge": judge, "implementation": who}]
    for request in requests:
        lines += [request, {"id": request["id"], "ok": None}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


NEW = {"id": 1, "op": "blocks.new", "args": {"num_blocks": 30}}
ALLOCATE = {"id": 2, "op": "blocks.allocate", "on": 1, "args": {}}
FREE = {"id": 3, "op": "blocks.free", "on": 1, "args": {"block": {"reply": 2}}}
NUM_FREE = {"id": 4, "op": "blocks.num_free", "on": 1, "args": {}}


def test_without_a_call_nothing_is_right(kvref, tmp_path):
    written(tmp_path / "empty.jsonl", [])
    done = kvref("replay", "empty.jsonl")
    said = "kvref: empty.jsonl: no call could be made, so mine:Mine is not judged\n"
    assert (done.returncode, done.stdout.count("as it must be"), done.stderr) == (2, 0, said)
    written(tmp_path / "made.jsonl", [NEW, ALLOCATE])
    done = kvref("replay", "made.jsonl", "mine:NotThisSize")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvref: mine:NotThisSize does not offer fewer than a thousand blocks\n"


def test_a_conversation_that_stops_short_of_its_end_shows_nothing(kvref, tmp_path):
    written(tmp_path / "to_free.jsonl", [NEW, ALLOCATE, FREE])
    assert kvref("replay", "to_free.jsonl").returncode == 0
    done = kvref("replay", "to_free.jsonl", "mine:NoFree")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "kvref: mine:NoFree does not offer blocks.free\n")


def test_what_is_left_out_on_the_way_is_said(kvref, tmp_path):
    again = [{"id": 5 + n, "op": "blocks.allocate", "on": 1, "args": {}} for n in range(2)]
    written(tmp_path / "past_free.jsonl", [NEW, ALLOCATE, FREE, *again])
    done = kvref("replay", "past_free.jsonl", "mine:NoFree")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["not offered, and skipped: blocks.free", "every reply is as expected"]


def test_every_call_is_shown(kvref, tmp_path):
    many = [{"id": 10 + n, "op": "blocks.allocate", "on": 1, "args": {}} for n in range(MAX_SHOWN_CALLS + 10)]
    written(tmp_path / "long.jsonl", [NEW, *many])
    done = kvref("replay", "long.jsonl")
    assert (done.returncode, done.stdout.count(".allocate()")) == (0, MAX_SHOWN_CALLS + 10)
    assert "..." not in done.stdout


def test_every_call_of_a_check_is_shown_too(kvref, tmp_path):
    """A trace that only its check can judge: the check runs again, and its calls are shown, whether it passes or fails."""
    check = "num free and num used add up (blocks)"
    written(tmp_path / "check.jsonl", [], "check", "LAW-03", check)
    done = kvref("replay", "check.jsonl", "numpy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "every reply is as expected"
    assert done.stdout.count("blocks.free(") > MAX_SHOWN_CALLS
    done = kvref("replay", "check.jsonl", "mine:LosesTheTenth")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "first mismatch at line 1 of check.jsonl")
    assert done.stdout.count("blocks.free(") == 10
    assert "..." not in done.stdout
    written(tmp_path / "gone.jsonl", [], "check", "LAW-03", "a check of another kvref (blocks)")
    assert kvref("replay", "gone.jsonl", "numpy").returncode == 2


def test_what_is_left_out_of_a_failure_says_how_to_see_it(kvref):
    calls = [f"call {number}" for number in range(20)]
    assert shorten_calls(calls[:MAX_SHOWN_CALLS]) == calls[:MAX_SHOWN_CALLS]
    assert shorten_calls(calls) == ["call 0", "... 13 more calls, which kvref replay shows", *calls[14:]]
