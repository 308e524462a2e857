"""Messages between the judge and its child arrive completely, and are distinguished from anything else in the socket."""

import os
import pickle
import socket
import time
import zlib
from threading import Thread

import pytest

from kvref_conformance.drivers.socket_channel import FRAME_HEADER, FRAME_MARK, MalformedFrame, SocketChannel


@pytest.fixture
def ends():
    """The judge's end of a channel, and the child's socket."""
    ours, theirs = socket.socketpair()
    channel = SocketChannel(ours.detach())
    with theirs:
        yield channel, theirs
    channel.close()


def framed(content, mark=FRAME_MARK, checksum=None):
    return FRAME_HEADER.pack(mark, len(content), zlib.crc32(content) if checksum is None else checksum) + content


def test_messages_come_over_whole_and_in_order(ends):
    judge, child = ends[0], SocketChannel(os.dup(ends[1].fileno()))
    messages = ["first", ("answer", bytes(2**22)), None]  # larger than the socket's buffer
    sender = Thread(target=lambda: [child.send(message) for message in messages])
    sender.start()
    assert [judge.receive(20) for _ in messages] == messages
    sender.join()
    assert not judge.has_data(0)
    child.close()


@pytest.mark.parametrize(
    "written",
    [
        b"garbage" * 10,
        bytes(100),
        b"\xff" * 100,
        framed(pickle.dumps(1), mark=FRAME_MARK[::-1]),
        framed(pickle.dumps(1), checksum=7),
        framed(b"no pickle"),
        framed(b""),
        framed(b"cnowhere\nnothing\n."),
    ],
)
def test_what_is_no_message_is_told_at_once(ends, written):
    channel, child = ends
    child.sendall(written)
    with pytest.raises(MalformedFrame):
        channel.receive()


@pytest.mark.parametrize(
    "begun", [FRAME_MARK[:3], FRAME_HEADER.pack(FRAME_MARK, 2**62, 0), framed(pickle.dumps("all but the end"))[:-1]]
)
def test_what_does_not_come_to_its_end_is_waited_for_no_longer_than_said(ends, begun):
    channel, child = ends
    child.sendall(begun)
    with pytest.raises(TimeoutError):
        channel.receive(0.05)


def test_a_drop_now_and_then_does_not_keep_it_waiting(ends):
    channel, child = ends
    child.sendall(FRAME_HEADER.pack(FRAME_MARK, 2**62, 0))

    def drip():
        for _ in range(200):
            child.sendall(b".")
            time.sleep(0.01)

    dripping = Thread(target=drip)
    dripping.start()
    with pytest.raises(TimeoutError):
        channel.receive(0.1)
    assert dripping.is_alive()
    dripping.join()


@pytest.mark.parametrize("said", [b"", FRAME_MARK, framed(pickle.dumps("all but the end"))[:-1]])
def test_who_goes_in_the_middle_of_a_message_is_gone(ends, said):
    channel, child = ends
    child.sendall(said)
    child.close()
    assert channel.has_data(0)
    with pytest.raises(EOFError):
        channel.receive()
