"""The journal of a process that can end at any moment, and the line of the user's code that caused it."""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvref_conformance.calls.messages import CallError, CallReply, CallRequest, Exchange
from kvref_conformance.calls.source_location import defined_at, raised_at
from kvref_conformance.drivers.crash_log import RECORD_HEADER, CrashLog, CrashLogWriter


def exchange(number, op="blocks.allocate", reply=None):
    return Exchange(CallRequest(number, op, 1, {"values": np.arange(number)}), reply)


@pytest.fixture
def journal():
    made = CrashLog()
    yield made
    made.close()


def told(writer, call_trace, *exchanges):
    for each in exchanges:
        call_trace.append(each)
        writer(SimpleNamespace(call_trace=call_trace), each)


def shown(call_trace):
    return [(each.request.id, each.request.args["values"].tolist(), each.reply and each.reply.ok) for each in call_trace]


def test_what_was_written_is_read(journal):
    call_trace, writer = [], CrashLogWriter(journal.descriptor)
    assert journal.read() == []
    told(writer, call_trace, exchange(1))
    call_trace[-1].reply = CallReply(7)
    told(writer, call_trace, exchange(2))
    call_trace[-1].reply = CallReply(error=CallError("OutOfBlocks", "no", "mine.py:3"))
    told(writer, call_trace, exchange(3))
    found = journal.read()
    assert shown(found) == [(1, [0], 7), (2, [0, 1], None), (3, [0, 1, 2], None)]
    assert (found[1].reply.error.kind, found[1].reply.error.where, found[2].reply) == ("OutOfBlocks", "mine.py:3", None)


def test_what_somebody_else_writes_there_does_no_harm(journal):
    call_trace, writer = [], CrashLogWriter(journal.descriptor)
    told(writer, call_trace, exchange(1))
    os.write(journal.descriptor, b"garbage" * 10)
    told(writer, call_trace, exchange(2))
    assert shown(journal.read()) == [(1, [0], None), (2, [0, 1], None)]


def test_what_was_declined_is_left_out(journal):
    call_trace, writer = [], CrashLogWriter(journal.descriptor)
    told(writer, call_trace, exchange(1, reply=CallReply(1)), exchange(2))
    call_trace.pop()
    told(writer, call_trace, exchange(3))
    assert shown(journal.read()) == [(1, [0], 1), (3, [0, 1, 2], None)]


def test_only_the_last_conversation_is_read(journal):
    writer = CrashLogWriter(journal.descriptor)
    told(writer, [], *(exchange(number) for number in range(1, 9)))
    told(writer, [], exchange(9))
    assert shown(journal.read()) == [(9, list(range(9)), None)]
    told(writer, [], exchange(1))
    assert shown(journal.read()) == [(1, [0], None)]


@pytest.mark.parametrize("kept", [0, 5, RECORD_HEADER.size, RECORD_HEADER.size + 10])
def test_what_was_cut_short_is_not_read(journal, kept):
    call_trace, writer = [], CrashLogWriter(journal.descriptor)
    told(writer, call_trace, exchange(1))
    whole = os.fstat(journal.descriptor).st_size
    told(writer, call_trace, exchange(2))
    os.ftruncate(journal.descriptor, whole + kept)
    assert [each.request.id for each in journal.read()] == [1]
    os.ftruncate(journal.descriptor, whole + 1000)  # zeros, as a file system can leave them
    assert [each.request.id for each in journal.read()] == [1]


THEIRS = """
import json

def parses():
    json.loads("{")

def asks_kvref():
    import kvref
    kvref.BlockPool(
        -1
    )

def takes(one):
    pass
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import theirs

    yield theirs
    del sys.modules["theirs"]


def raised_by(function, *args):
    try:
        function(*args)
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this frame
        return error


@pytest.mark.parametrize(("name", "line"), [("parses", 5), ("asks_kvref", 9)])
def test_the_line_to_blame_is_theirs(theirs, name, line):
    assert raised_at(raised_by(getattr(theirs, name))) == f"theirs.py:{line}"


def test_a_library_is_blamed_where_there_is_nobody_else():
    assert raised_at(raised_by(json.loads, "{")).startswith(json.__path__[0])


def test_nobody_is_blamed_for_what_is_kvrefs(theirs):
    import kvref

    assert raised_at(raised_by(kvref.BlockPool, -1)) == ""
    assert defined_at(kvref.BlockPool.free) == ""
    assert defined_at(len) == ""
    assert defined_at(theirs.takes) == "theirs.py:13"
