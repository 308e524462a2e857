"""The reference engine compared with one that recomputes everything: shared blocks, and evictions under memory pressure."""

import random

import pytest

from kvref.canary import FIRST_WORD, Canary
from kvref.engine import Engine
from kvref.errors import OutOfBlocks, PositionOutOfRange

CANARY = Canary(offsets=(3, 4), context=96, num_kv_heads=1, num_query_heads=2, head_dim=32)
BLOCK_SIZE = 4


def words(count, first=0):
    return [FIRST_WORD + (first + 7 * number) % CANARY.words for number in range(count)]


def engine(blocks=64):
    return Engine(CANARY, blocks * BLOCK_SIZE, BLOCK_SIZE)


def told(on, tokens):
    session = on.open()
    on.extend(session, tokens)
    return session


def anew(tokens, count):
    """The tokens that a new engine generates after the given tokens."""
    fresh = engine()
    return fresh.generate(told(fresh, tokens), count)


def test_a_fork_takes_no_block_and_goes_on_by_itself():
    on = engine()
    parent = told(on, words(18))
    free = on.cache.num_free_blocks
    child = on.fork(parent)
    assert on.cache.num_free_blocks == free
    on.extend(child, words(1, 50))
    assert on.generate(child, 9) == anew([*words(18), *words(1, 50)], 9)
    assert on.generate(parent, 9) == anew(words(18), 9)


def test_a_number_of_samples_is_looked_at_before_there_is_room():
    on = engine(blocks=5)
    child = on.fork(told(on, words(18)))
    on.truncate(child, 16)  # its last token is in a shared block
    with pytest.raises(OutOfBlocks):
        on.sample(child, 1, 0)
    with pytest.raises(PositionOutOfRange):
        on.sample(child, -1, 0)


def test_what_was_seen_is_found():
    on = engine()
    first = told(on, words(18))
    free = on.cache.num_free_blocks
    second = told(on, words(18))
    assert free - on.cache.num_free_blocks == CANARY.num_layers  # only the last block: 16 of 18 tokens are in full blocks
    on.close(first)
    assert on.generate(second, 9) == anew(words(18), 9)


def test_a_step_is_taken_by_all_or_none():
    on = engine(blocks=5)  # 18 tokens need all of them, and a fork that continues needs a copy of the last one
    parent = told(on, words(18))
    child = on.fork(parent)
    with pytest.raises(OutOfBlocks):
        on.step([parent, child])
    assert on.length(parent) == on.length(child) == 18
    on.close(child)
    assert on.step([parent]) == anew(words(18), 1)
    assert on.generate(parent, 1) == anew(words(18), 2)[1:]


def test_what_a_step_took_back_is_said_again():
    on = engine(blocks=6)
    parent = told(on, words(18))
    first, second = on.fork(parent), on.fork(parent)
    on.close(parent)
    third = on.fork(first)
    with pytest.raises(OutOfBlocks):
        on.step([first, second, third])  # two copies are needed, one block is free
    assert [on.length(each) for each in (first, second, third)] == [18, 18, 18]
    on.close(third)
    assert on.step([first, second]) == anew(words(18), 1) * 2


def test_an_interrupted_step_leaves_the_session_as_it_was(monkeypatch):
    on = engine()
    session = told(on, words(18))
    write = on.cache.write
    calls = iter(range(10))

    def interrupted(*given):
        write(*given)
        if next(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(on.cache, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        on.extend(session, words(5, 50))
    monkeypatch.undo()
    assert on.length(session) == 18
    assert on.generate(session, 9) == anew(words(18), 9)


@pytest.mark.parametrize("seed", range(20))
def test_any_edits_leave_a_list_of_tokens(seed):
    chance, on = random.Random(seed), engine(blocks=48)
    sessions = {told(on, words(20)): words(20)}
    for _ in range(40):
        session = chance.choice(list(sessions))
        tokens = sessions[session]
        what = chance.choice(("truncate", "remove", "fork", "generate", "extend", "save", "close"))
        if what == "truncate":
            length = chance.randint(1, len(tokens))
            on.truncate(session, length)
            sessions[session] = tokens[:length]
        elif what == "remove":
            start = chance.randint(1, len(tokens))
            stop = chance.randint(start, len(tokens))
            on.remove(session, start, stop)
            sessions[session] = tokens[:start] + tokens[stop:]
        elif what == "fork" and len(sessions) < 4:
            sessions[on.fork(session)] = list(tokens)
        elif what == "generate" and len(tokens) < 60:
            said = on.generate(session, 3)
            assert said == anew(tokens, 3)
            sessions[session] = tokens + said
        elif what == "extend" and len(tokens) < 60:
            more = words(chance.randint(0, 6), chance.randint(0, 99))
            on.extend(session, more)
            sessions[session] = tokens + more
        elif what == "save" and len(sessions) < 4:
            sessions[on.load(on.save(session))] = list(tokens)
        elif what == "close" and len(sessions) > 1:
            on.close(session)
            del sessions[session]
    for session, tokens in sessions.items():
        assert on.length(session) == len(tokens)
        assert on.generate(session, 5) == anew(tokens, 5)
        on.close(session)
    assert on.cache.utilization == 0.0
