"""Checks of RECUR: checkpoints, hits, blocks and eviction."""

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.recurrent.fixture import RecurrentFixture
from kvref_conformance.testlib.assertions import assert_equal, assert_same, raises
from kvref_conformance.testlib.registry import check

LAST = 10**6  # a token after a prompt, because a hit never includes the last token


def serve(fixture: RecurrentFixture, tokens: list[int], salt: str = "", every: int = 1) -> int:
    """Begins a sequence, and appends, checkpoints and commits the tokens after the hit in steps of `every` boundaries."""
    sequence: int = fixture.cache.begin(tokens, *([salt] if salt else []))
    step = every * fixture.config["interval"]
    while (length := int(fixture.cache.length(sequence))) < len(tokens):
        stop = min(len(tokens), (length // step + 1) * step)
        fixture.append(sequence, stop - length)
        if stop % step == 0:
            fixture.cache.checkpoint(sequence)
        fixture.cache.commit(sequence, tokens[:stop])
    return sequence


def prompt(fixture: RecurrentFixture, boundaries: int, first: int = 0) -> list[int]:
    """A prompt of this number of intervals."""
    return list(range(first, first + boundaries * fixture.config["interval"]))


def match(fixture: RecurrentFixture, tokens: list[int], salt: str = "") -> int:
    return int(fixture.cache.match([*tokens, LAST], *([salt] if salt else [])))


@check("RECUR-10ab", "recurrent")
def checkpoint_keeps_its_state(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    sequence = fixture.filled(2)
    before = fixture.state(sequence)
    for _ in range(2):
        fixture.cache.checkpoint(sequence)
        fixture.check_same(sequence, before, "after checkpoint")
    for count in (1, 4, 2):
        fixture.append(sequence, count)
        fixture.cache.truncate(sequence, 2)
        fixture.check_same(sequence, before, f"after an append of {count} and truncate to a checkpoint")
    fixture.look_at_states()


@check("RECUR-10a", "recurrent")
def checkpoint_of_the_same_length_allocates_nothing(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1, num_blocks=2)
    sequence, free = fixture.filled(0), fixture.config["num_blocks"] - 1
    fixture.cache.checkpoint(sequence)
    assert_equal(int(fixture.cache.num_free_blocks), free, "free blocks after a checkpoint of an empty sequence")
    fixture.append(sequence, 1)
    for _ in range(3):
        fixture.cache.checkpoint(sequence)
        assert_equal(int(fixture.cache.num_free_blocks), free - 1, "free blocks after checkpoints of one length")


@check("RECUR-10b", "recurrent")
def checkpoints_of_several_lengths_are_kept(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    sequence, states = fixture.cache.create(), {}
    for length in (1, 2, 4):
        fixture.append(sequence, length - int(fixture.cache.length(sequence)))
        fixture.cache.checkpoint(sequence)
        states[length] = fixture.state(sequence)
    fixture.append(sequence, 3)
    for length in (4, 2, 1):
        fixture.cache.truncate(sequence, length)
        fixture.check_same(sequence, states[length], f"after truncate to the checkpoint of length {length}")


@check("RECUR-10bc", "recurrent")
def checkpoints_of_a_fork_outlive_its_parent(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = RecurrentFixture(subject, num_heads=1)
    parent = fixture.filled(2)
    fixture.cache.checkpoint(parent)
    before = fixture.state(parent)
    fixture.append(parent, 1)
    child = fixture.cache.fork(parent)
    fixture.cache.truncate(parent, 0)
    fixture.append(parent, 2)
    fixture.cache.checkpoint(parent)
    fixture.cache.drop(parent)
    fixture.append(fixture.cache.create(), 2)
    fixture.cache.truncate(child, 2)
    fixture.check_same(child, before, "of a fork after truncate to a checkpoint of its parent")
    fixture.look_at_states()


@check("RECUR-11ab", "recurrent")
def begin_returns_the_state_of_the_longest_checkpoint(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    tokens, size = prompt(fixture, 3), fixture.config["interval"]
    first = serve(fixture, tokens)
    for length in range(len(tokens) + 1):
        hit = max(0, length - 1) // size * size
        assert_equal(int(fixture.cache.match(tokens[:length])), hit, f"hit of {length} tokens")
    at_end = fixture.state(first)
    fixture.append(first, 1)
    second = fixture.cache.begin([*tokens, LAST])
    assert_equal(int(fixture.cache.length(second)), len(tokens), "length of a sequence that begins with a hit")
    fixture.check_same(second, at_end, "of a sequence that begins with a hit")
    fixture.append(second, 2)
    fixture.look_at_states()
    fixture.cache.truncate(second, len(tokens))
    fixture.check_same(second, at_end, "after truncate to the hit")


@check("RECUR-11ab", "recurrent")
def match_needs_no_checkpoint_at_shorter_boundaries(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    tokens = prompt(fixture, 4)
    fixture.cache.drop(serve(fixture, tokens, every=2))
    half = len(tokens) // 2
    for length, hit in ((len(tokens), len(tokens)), (len(tokens) - 1, half), (half, half), (half - 1, 0)):
        assert_equal(match(fixture, tokens[:length]), hit, f"hit of {length} tokens with checkpoints at every second boundary")


@check("RECUR-11b", "recurrent")
def begin_without_a_hit_starts_from_the_zero_state(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    serve(fixture, prompt(fixture, 1))
    for tokens in ([], [LAST], prompt(fixture, 2, first=1)):
        sequence = fixture.cache.begin(tokens)
        assert_equal(int(fixture.cache.length(sequence)), 0, "length of a sequence without a hit")
        for state in fixture.state(sequence):
            assert_same(state, np.zeros_like(np.asarray(state)), "state of a sequence without a hit")
        fixture.append(sequence, 1)
        fixture.look_at_states()
        fixture.cache.drop(sequence)


@check("RECUR-11c", "recurrent")
def match_never_exceeds_the_boundary_of_a_state(subject: Subject) -> None:
    """All tokens are committed, and some boundaries have no checkpoint: their layers have tokens and no state."""
    fixture = RecurrentFixture(subject, num_heads=1)
    tokens, size = prompt(fixture, 3), fixture.config["interval"]
    sequence = fixture.cache.create()
    fixture.append(sequence, size)
    fixture.cache.checkpoint(sequence)
    fixture.append(sequence, 2 * size)
    fixture.cache.commit(sequence, tokens)
    assert_equal(match(fixture, tokens), size, "hit of committed tokens with one checkpoint")
    begun = fixture.cache.begin([*tokens, LAST])
    assert_equal(int(fixture.cache.length(begun)), size, "length of a sequence that begins there")
    fixture.look_at_states()


@check("RECUR-12a", "recurrent")
def commit_adds_checkpoints_at_boundaries_alone(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    size = fixture.config["interval"]
    sequence, tokens = fixture.cache.create(), prompt(fixture, 3)
    for length in sorted({1, size, size + 1, 2 * size}):
        fixture.append(sequence, length - int(fixture.cache.length(sequence)))
        fixture.cache.checkpoint(sequence)
    assert_equal(match(fixture, tokens), 0, "hit before commit")
    fixture.cache.commit(sequence, tokens[: 2 * size - 1])
    assert_equal(match(fixture, tokens), size if size > 1 else 1, "hit after commit of a token less than two boundaries")
    fixture.cache.commit(sequence, tokens[: 2 * size])
    assert_equal(match(fixture, tokens), 2 * size, "hit after commit of two boundaries")
    fixture.append(sequence, size)
    fixture.cache.commit(sequence, tokens)
    fixture.cache.checkpoint(sequence)
    assert_equal(match(fixture, tokens), 2 * size, "hit of a checkpoint that was taken after commit")
    fixture.cache.commit(sequence, tokens)
    assert_equal(match(fixture, tokens), 3 * size, "hit after the next commit")


@check("RECUR-12a", "recurrent")
def match_does_not_find_a_checkpoint_between_boundaries(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    fixture.need(interval=2)
    tokens, sequence = prompt(fixture, 2), fixture.filled(1)
    fixture.cache.checkpoint(sequence)
    fixture.append(sequence, fixture.config["interval"])
    fixture.cache.checkpoint(sequence)
    fixture.append(sequence, len(tokens) - 1 - fixture.config["interval"])
    fixture.cache.commit(sequence, tokens)
    assert_equal(match(fixture, tokens), 0, "hit of checkpoints one token after each boundary")


@check("RECUR-12b", "recurrent")
def match_compares_the_salt_and_all_tokens(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    tokens = prompt(fixture, 2)
    serve(fixture, tokens, "a")
    for place in range(len(tokens)):
        other = [*tokens[:place], LAST, *tokens[place + 1 :]]
        size = fixture.config["interval"]
        assert_equal(match(fixture, other, "a"), place // size * size, f"hit of a prompt with another token at {place}")
    assert_equal([match(fixture, tokens, salt) for salt in ("a", "", "b")], [len(tokens), 0, 0], "hits of salts a, none and b")


@check("RECUR-12b", "recurrent")
def commit_uses_the_salt_of_the_sequence(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = RecurrentFixture(subject, num_heads=1)
    tokens = prompt(fixture, 2)
    parent = serve(fixture, tokens[: fixture.config["interval"]], "a")
    child = fixture.cache.fork(parent)
    fixture.append(child, fixture.config["interval"])
    fixture.cache.checkpoint(child)
    fixture.cache.commit(child, tokens)
    assert_equal([match(fixture, tokens, salt) for salt in ("a", "")], [len(tokens), 0], "hits of a fork's tokens")


@check("RECUR-12c", "recurrent")
def commit_of_wrong_tokens_raises(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    sequence, tokens = fixture.filled(4), [3, 1, 4, 1]
    with raises("PositionOutOfRange"):
        fixture.cache.commit(sequence, [*tokens, 5])
    fixture.cache.commit(sequence, tokens[:3])
    with raises("TokenMismatch"):
        fixture.cache.commit(sequence, [3, 1, 5])
    with raises("TokenMismatch"):
        fixture.cache.commit(sequence, [2, *tokens[1:]])
    fixture.cache.commit(sequence, tokens)
    fixture.look_at_states()


@check("RECUR-13a", "recurrent")
def blocks_are_counted_per_sequence_and_checkpoint(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = RecurrentFixture(subject, num_heads=1)
    free, tokens = fixture.config["num_blocks"], prompt(fixture, 1)

    def check_free(used: int, when: str) -> None:
        assert_equal(int(fixture.cache.num_free_blocks), free - used, f"free blocks {when}")

    check_free(0, "of a new cache")
    sequence = serve(fixture, tokens)
    check_free(2, "with a sequence and a checkpoint")
    child = fixture.cache.fork(sequence)
    check_free(3, "with a fork, which shares the checkpoint")
    fixture.cache.drop(sequence)
    check_free(2, "after the parent was dropped")
    fixture.append(child, 1)
    fixture.cache.checkpoint(child)
    check_free(3, "with another checkpoint")
    fixture.cache.truncate(child, len(tokens))
    check_free(2, "after truncate")
    fixture.cache.drop(child)
    check_free(0, "after every sequence was dropped, with a cached checkpoint")
    begun = fixture.cache.begin([*tokens, LAST])
    check_free(2, "with a sequence that begins with a hit")
    fixture.cache.drop(begun)
    check_free(0, "after it was dropped")


def full(subject: Subject) -> tuple[RecurrentFixture, int]:
    """A cache whose blocks are all in use, and one of its sequences. No checkpoint is at its length."""
    fixture = RecurrentFixture(subject, num_heads=1, num_blocks=3)
    sequence = fixture.cache.create()
    for _ in range(fixture.config["num_blocks"] - 1):
        fixture.append(sequence, 1)
        fixture.cache.checkpoint(sequence)
    fixture.append(sequence, 1)
    return fixture, sequence


@check("RECUR-13b", "recurrent")
def operations_without_a_free_block_raise(subject: Subject) -> None:
    fixture, sequence = full(subject)
    calls = {
        "create": fixture.cache.create, "fork": lambda: fixture.cache.fork(sequence),
        "checkpoint": lambda: fixture.cache.checkpoint(sequence), "begin": lambda: fixture.cache.begin([1]),
    }  # fmt: skip
    for call in calls.values():
        with raises("OutOfBlocks"):
            call()
        assert_equal(int(fixture.cache.num_free_blocks), 0, "free blocks after OutOfBlocks")
        fixture.look_at_states()


@check("RECUR-13c", "recurrent")
def operations_work_while_blocks_suffice(subject: Subject) -> None:
    fixture, sequence = full(subject)
    data = fixture.cache.save(sequence)
    fixture.append(sequence, 3)
    fixture.cache.append_batch([sequence], [1], **fixture.tokens(1, 2))
    fixture.cache.load(sequence, data)
    fixture.cache.truncate(sequence, 0)
    fixture.cache.drop(sequence)
    for number in range(fixture.config["num_blocks"]):
        serve(fixture, [number])
    fixture.look_at_states()


@check("RECUR-13bc", "recurrent")
def begin_needs_a_block_besides_that_of_its_hit(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1, num_blocks=2)
    tokens = prompt(fixture, 1)
    fixture.cache.drop(serve(fixture, tokens))
    others = [fixture.cache.create() for _ in range(fixture.config["num_blocks"] - 1)]
    with raises("OutOfBlocks"):
        fixture.cache.begin([*tokens, LAST])
    assert_equal(match(fixture, tokens), len(tokens), "hit after OutOfBlocks")
    fixture.cache.drop(others.pop())
    begun = fixture.cache.begin([*tokens, LAST])
    fixture.append(begun, 1)
    fixture.look_at_states()


@check("RECUR-14a", "recurrent")
def checkpoints_of_live_sequences_are_kept(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1, num_blocks=4)
    fixture.need(num_blocks=4)
    tokens = prompt(fixture, 1)
    fixture.cache.drop(serve(fixture, tokens))
    begun = fixture.cache.begin([*tokens, LAST])
    before = fixture.state(begun)
    for number in range(2 * fixture.config["num_blocks"]):
        other = fixture.cache.create()
        fixture.append(other, 1)
        fixture.cache.checkpoint(other) if number % 2 else None
        fixture.cache.drop(other)
    assert_equal(match(fixture, tokens), len(tokens), "hit of a checkpoint that a sequence has")
    fixture.append(begun, 2)
    fixture.cache.truncate(begun, len(tokens))
    fixture.check_same(begun, before, "after truncate to a checkpoint that a sequence has")


@check("RECUR-14bc", "recurrent")
def checkpoints_are_evicted_in_the_order_of_their_release(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1, num_blocks=5)
    fixture.need(num_blocks=5)
    prompts, others = [prompt(fixture, 1, first=number * 100) for number in range(3)], list[int]()
    for tokens in prompts:
        fixture.cache.drop(serve(fixture, tokens))
    fixture.cache.drop(fixture.cache.begin([*prompts[0], LAST]))  # released again: it is the last now
    if subject.limits.switch("recurrent", "other_eviction_order"):
        return
    order = [prompts[1], prompts[2], prompts[0]]
    others += [fixture.cache.create() for _ in range(fixture.config["num_blocks"] - 3)]
    for gone in range(4):
        hits = [match(fixture, tokens) for tokens in order]
        assert_equal(hits, [0] * gone + [len(tokens) for tokens in order[gone:]], f"hits after {gone} evictions")
        others += [fixture.cache.create()] if gone < 3 else []
    assert_equal(int(fixture.cache.num_free_blocks), 0, "free blocks at the end")


@check("RECUR-14c", "recurrent")
def longer_checkpoints_of_one_sequence_are_evicted_first(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1, num_blocks=4)
    fixture.need(num_blocks=4)
    tokens, size = prompt(fixture, 3), fixture.config["interval"]
    fixture.cache.drop(serve(fixture, tokens))
    if subject.limits.switch("recurrent", "other_eviction_order"):
        return
    for _ in range(fixture.config["num_blocks"] - 3):
        fixture.cache.create()
    for boundaries in (3, 2, 1, 0):
        assert_equal(match(fixture, tokens), boundaries * size, f"hit with {boundaries} checkpoints left")
        if boundaries:
            fixture.cache.create()


@check("RECUR-14d", "recurrent")
def reset_empties_the_index(subject: Subject) -> None:
    fixture = RecurrentFixture(subject, num_heads=1)
    tokens = prompt(fixture, 2)
    sequence = serve(fixture, tokens)
    with raises("InUse"):
        fixture.cache.reset()
    assert_equal(match(fixture, tokens), len(tokens), "hit after reset raised")
    fixture.cache.drop(sequence)
    fixture.cache.reset()
    assert_equal(match(fixture, tokens), 0, "hit after reset")
    assert_equal(int(fixture.cache.num_free_blocks), fixture.config["num_blocks"], "free blocks after reset")
    serve(fixture, tokens)
    fixture.look_at_states()
