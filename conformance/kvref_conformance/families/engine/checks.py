"""ENG: whole engines. Each clause is checked by the tokens that a canary model generates."""

from collections.abc import Callable, Sequence
from typing import Any

from kvref.canary import BOS, FIRST_WORD
from kvref.canary.hybrid import LAP, HybridCanary, laps
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families.engine import FAMILY
from kvref_conformance.families.engine.model import Engine
from kvref_conformance.testlib.assertions import assert_equal, assert_true, may_raise, raises
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session

SESSIONS = 5  # default cache size, in sessions of full context length
MANY = 64  # sessions after which a cache counts as unbounded


class EngineFixture(Session):
    """An engine with random prompts. The model predicts each token that it generates."""

    model: Engine

    def __init__(self, subject: Subject, **sizes: int) -> None:
        context = subject.size("context", sizes.get("context", FAMILY.small["context"]))
        super().__init__(subject, None, **{"cache_tokens": SESSIONS * context} | sizes)
        self.engine, self.canary, self.period = self.cache, self.model.canary, self.model.canary.period
        self.continues_laps = isinstance(self.canary, HybridCanary) and self.canary.continues_laps

    def prompt(self, count: int = 0, among: Sequence[int] = ()) -> list[int]:
        """Begin-of-text and `count` random words, by default the period plus 5. If the canary recalls, all words are distinct.

        among: the numbers of the words to draw from, by default all. A canary that continues laps gets laps in a random order.
        """
        count = count or self.period + 5
        if self.continues_laps:
            return [BOS, *laps(self.subject.rng.permutation(LAP).tolist(), int(self.subject.rng.integers(LAP)), count)]
        words = list(among) or list(range(self.canary.words))
        drawn = self.subject.rng.choice(words, size=count, replace=not self.canary.recalls)
        return [BOS, *(FIRST_WORD + int(word) for word in drawn)]

    def words(self, count: int) -> list[int]:
        return self.prompt(count)[1:]

    def open(self, *chunks: Sequence[int]) -> int:
        """Opens a session and appends a prompt to it in these chunks."""
        session = int(self.engine.open())
        for chunk in chunks:
            self.engine.extend(session, list(chunk))
        return session

    def tokens(self, session: int) -> list[int]:
        return self.model.sessions[session].tokens

    def room(self, session: int) -> int:
        """The number of tokens that the session can still contain."""
        return self.canary.context - len(self.tokens(session))

    def generate(self, session: int, count: int) -> None:
        self.engine.generate(session, count)
        self.assert_periodic(session, count)

    def step(self, sessions: Sequence[int], times: int) -> None:
        """Generates one token per session, `times` times."""
        for _ in range(times):
            self.engine.step(list(sessions))
        for session in sessions:
            self.assert_periodic(session, times)

    def assert_periodic(self, session: int, count: int) -> None:
        """Raises ClauseViolation unless the last `count` tokens repeat those of one period before.

        A window, a recall or laps change them.
        """
        if not (self.continues_laps or self.canary.recalls or any(self.canary.windows)):
            tokens = self.tokens(session)
            assert_equal(
                tokens[-count:], tokens[-count - self.period : -self.period], f"last {count} tokens of session {session}"
            )


@check("ENG-01a", "engine")
def generate_repeats_a_period_to_the_end_of_the_context(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    session = fixture.open(fixture.prompt())
    fixture.generate(session, fixture.room(session))


@check("ENG-01b", "engine")
def generate_recalls_the_tokens_after_an_earlier_occurrence(subject: Subject) -> None:
    subject.require_size(recalls=1)
    fixture = EngineFixture(subject, recalls=1)
    prompt = fixture.prompt(40)
    session = fixture.open([*prompt, prompt[2]])
    output = fixture.engine.generate(session, len(prompt) - 3)
    assert_equal([int(token) for token in output], prompt[3:], "tokens after a second copy of the prompt's third token")


@check("ENG-01c", "engine")
def generate_continues_laps(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    if not fixture.continues_laps:
        raise NotOffered("a canary that continues laps (recurrent)")
    for more in (1, 5, 40):  # just a lap and a word; in the middle of a lap; several laps
        order, start = subject.rng.permutation(LAP).tolist(), int(subject.rng.integers(LAP))
        text = laps(order, start, LAP + more + 50)
        session = fixture.open([BOS, *text[: LAP + more]])
        said = [int(token) for token in fixture.engine.generate(session, 50)]
        assert_equal(said, text[LAP + more :], "tokens after laps")


@check("ENG-01ac", "engine")
def generate_after_prompts_that_end_just_past_a_chunk(subject: Subject) -> None:
    """Many kernels process prompts in chunks of such sizes. What is lost at the end of one may be read within a lap only."""
    fixture = EngineFixture(subject)
    for chunk in (64, 128, 256):
        for more in (1, 8, 15):
            if chunk + more + LAP <= fixture.canary.context:
                session = fixture.open(fixture.prompt(chunk + more - 1))
                fixture.generate(session, LAP)
                fixture.engine.close(session)


@check("ENG-02", "engine")
def step_generates_the_tokens_of_each_session_alone(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    sessions = [fixture.open(fixture.prompt(fixture.period + more)) for more in (0, 7, 16)]
    for batch in (sessions, sessions[::-1], sessions[::-1][:2], sessions):
        fixture.step(batch, 12)


@check("ENG-03", "engine")
def extend_in_chunks_equals_one_extend(subject: Subject) -> None:
    for size in (1, 7, 16, 17):
        fixture = EngineFixture(subject)
        prompt = fixture.prompt()
        session = fixture.open(*(prompt[start : start + size] for start in range(0, len(prompt), size)))
        fixture.generate(session, 20)


@check("ENG-04", "engine")
def extend_with_the_prefix_of_another_session_equals_a_new_prompt(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    period, engine = fixture.period, fixture.engine
    prompt = fixture.prompt(period + 1)  # hardly more than the tokens that the canary attends to
    first = fixture.open(prompt)
    fixture.generate(first, period)
    for length in (len(prompt), 33, 32, 17, 16, 15):  # on both sides of block boundaries
        session = fixture.open([*prompt[:length], *fixture.prompt(period + 1)[length:]])
        fixture.generate(session, period)
        engine.close(session)
    engine.close(first)
    fixture.generate(fixture.open(prompt), period)  # the prompt of a closed session
    fixture.generate(fixture.open([*fixture.prompt(15), *prompt[16:]]), period)  # other tokens in its first block


@check("ENG-04", "engine")
def step_of_two_continuations_of_a_closed_session_equals_new_prompts(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    for more in (5, 12):  # the shared prefix ends inside a block
        first = fixture.open(fixture.prompt(fixture.period + more))
        fixture.generate(first, 3)
        tokens = fixture.tokens(first)
        fixture.engine.close(first)
        pair = [fixture.open([*tokens, *fixture.words(count)]) for count in (12, 4)]
        fixture.step(pair, fixture.period)
        for session in pair:
            fixture.engine.close(session)


@check("ENG-05a", "engine")
def close_changes_no_other_session(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    first, second = fixture.open(fixture.prompt()), fixture.open(fixture.prompt())
    fixture.step([first, second], 5)
    fixture.engine.close(second)
    fixture.step([first], 3)
    third = fixture.open(fixture.prompt(fixture.period + 1))
    fixture.step([third, first], 20)


@check("ENG-05a", "engine")
def open_after_close_begins_without_a_state(subject: Subject) -> None:
    """A prompt of at most one lap does not replace all of a recurrent state.

    Its last word reads the cell into which the convolution of the closed session would write the first word. Begin-of-text would
    write nothing.
    """
    fixture = EngineFixture(subject)
    for count in (1, 9, LAP):
        first = fixture.open(fixture.prompt())
        fixture.generate(first, 5)
        low = fixture.canary.digits(fixture.tokens(first)[-1])[0]
        fixture.engine.close(first)
        prompt = fixture.prompt(count)[1:]
        if fixture.continues_laps:
            order = [*(each for each in subject.rng.permutation(LAP).tolist() if each != low), low]
            prompt = laps(order, int(subject.rng.integers(LAP)), LAP)[-count:]
        session = fixture.open(prompt)
        fixture.engine.generate(session, LAP)
        fixture.engine.close(session)


@check("ENG-05a", "engine")
def close_of_an_unused_loaded_session_changes_no_later_session(subject: Subject) -> None:
    """A transfer into the loaded session that is still in progress would land in the memory of the next session."""
    fixture = EngineFixture(subject)
    engine = fixture.engine
    first = fixture.open(fixture.prompt())
    saved = engine.save(first)
    engine.close(first)
    for _ in range(2):
        engine.close(engine.load(saved))
        session = fixture.open(fixture.prompt())
        fixture.generate(session, fixture.period)
        engine.close(session)


@check("ENG-05b", "engine")
def cancel_leaves_all_sessions_as_before(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    first, second = fixture.open(fixture.prompt()), fixture.open(fixture.prompt(fixture.period + 9))
    for count in (1, 8, fixture.period):
        fixture.engine.cancel(second, count)
        fixture.step([first], 2)
        third = fixture.open(fixture.prompt(fixture.period + 1))
        fixture.step([third, first, second], 7)
        fixture.engine.close(third)


@check("ENG-05b", "engine")
def extend_after_cancel_replaces_the_cancelled_tokens(subject: Subject) -> None:
    """More tokens are appended than were cancelled, so that the engine cannot notice by lengths that the cache has old ones."""
    fixture = EngineFixture(subject)
    session = fixture.open(fixture.prompt())
    for count in (8, 1):
        fixture.engine.cancel(session, count)
        fixture.engine.extend(session, fixture.words(count + 3))
    fixture.generate(session, fixture.period)  # each of these tokens decides one


@check("ENG-06ab", "engine")
def generate_in_a_full_cache_raises_or_is_correct(subject: Subject) -> None:
    fixture = EngineFixture(subject, cache_tokens=3 * subject.size("context", 128))
    for _ in range(MANY):
        session, prompt = fixture.open(), fixture.prompt(fixture.period + 15)
        if not (accepted(fixture.engine.extend, session, prompt) and accepted(fixture.generate, session, 3)):
            break
    sessions = [session for session in fixture.model.sessions if fixture.tokens(session)]
    assert_true(
        len(sessions) >= 2, "number of sessions before a cache for three full contexts is full", "at least 2", len(sessions)
    )
    unbounded = len(sessions) == MANY  # the engine swaps sessions out, or keeps no cache between calls
    if unbounded and accepted(fixture.step, sessions, 2):
        return
    for session in sessions:
        accepted(fixture.generate, session, 5)
    if unbounded:
        return
    for session in sessions[:2]:
        fixture.engine.close(session)
    fixture.generate(fixture.open(fixture.prompt()), 10)
    for session in sessions[2:]:
        accepted(fixture.generate, session, 5)


def accepted(call: Callable[..., Any], *args: Any) -> bool:
    """Whether a call succeeds.

    Raises ClauseViolation if it raises an error other than a permitted OutOfBlocks, as the model judges.
    """
    try:
        call(*args)
    except (ClauseViolation, NotOffered):
        raise
    except Exception:
        return False
    return True


@check("ENG-07a", "engine")
def extend_continues_a_conversation_of_several_turns(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    session = fixture.open(fixture.prompt())
    for turn in range(4):
        fixture.generate(session, 7)
        fixture.engine.extend(session, fixture.words(3 + turn))
    fixture.generate(session, fixture.period)


@check("ENG-07b", "engine")
def extend_with_one_other_early_token_equals_a_new_prompt(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    prompt = fixture.prompt(fixture.period + 20)
    session = fixture.open(prompt)
    fixture.generate(session, 10)
    for place in (25, 40, len(prompt) - 2):
        fixture.generate(fixture.open([*prompt[:place], *fixture.words(1), *prompt[place + 1 :]]), 25)
    fixture.generate(session, 20)


@check("ENG-08a", "engine")
def fork_and_parent_continue_independently(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    engine = fixture.engine
    for more in (0, 5, 14):  # last block full, partly filled, one slot free
        parent = fixture.open(fixture.prompt(fixture.period + more))
        child = int(engine.fork(parent))
        grandchild = int(engine.fork(child))
        engine.extend(child, fixture.words(2))
        engine.extend(parent, fixture.words(1))
        for session in (parent, grandchild, child):
            fixture.generate(session, 9)
        engine.close(parent)
        for session in (child, grandchild):
            fixture.generate(session, 15)
            engine.close(session)


@check("ENG-08b", "engine")
def sample_returns_the_generated_tokens_n_times(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    other = fixture.open(fixture.prompt())
    for more, n in ((0, 2), (5, 3), (14, 2)):
        session = fixture.open(fixture.prompt(fixture.period + more))
        answers = [int(token) for token in fixture.engine.sample(session, n, 19)]
        fixture.step([other, session], 9)
        assert_equal([answers[at : at + 9] for at in range(0, 19 * n, 19)], [fixture.tokens(session)[-9:]] * n, "sampled tokens")
        fixture.engine.sample(session, n, 3)
        fixture.engine.close(session)
    session = fixture.open(fixture.prompt())
    fixture.engine.sample(session, 2, 5)
    fixture.engine.extend(session, fixture.words(8))  # more than were sampled
    fixture.generate(session, fixture.period)


@check("ENG-09", "engine")
def truncate_removes_a_draft(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    session = fixture.open(fixture.prompt())
    for count in (1, 3, 16, 5):
        length = len(fixture.tokens(session))
        fixture.engine.extend(session, fixture.words(count))
        fixture.engine.truncate(session, length)
        fixture.generate(session, 6)
    fixture.engine.extend(session, fixture.words(2))
    fixture.engine.truncate(session, len(fixture.tokens(session)) - 2)
    fixture.engine.extend(session, fixture.words(5))  # more than were removed
    fixture.generate(session, fixture.period)


@check("ENG-09", "engine")
def truncate_removes_a_draft_of_several_calls(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    for counts in ((1, 1), (2, 1, 3)):
        fixture.generate(with_removed_draft(fixture, *counts), fixture.period)


@check("ENG-09", "engine")
def fork_after_truncate_has_no_draft(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    for count in (1, 3):
        session = with_removed_draft(fixture, count)
        copy = int(fixture.engine.fork(session))
        fixture.generate(copy, fixture.period)
        fixture.generate(session, 2)


@check("ENG-09", "engine")
def load_after_truncate_has_no_draft(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    for count in (1, 3):
        saved = int(fixture.engine.save(with_removed_draft(fixture, count)))
        fixture.generate(int(fixture.engine.load(saved)), fixture.period)


def with_removed_draft(fixture: EngineFixture, *counts: int) -> int:
    """A session that was extended with these numbers of random words, and truncated to its length before."""
    session = fixture.open(fixture.prompt())
    fixture.generate(session, 2)
    length = len(fixture.tokens(session))
    for count in counts:
        fixture.engine.extend(session, fixture.words(count))
    fixture.engine.truncate(session, length)
    return session


@check("ENG-10ad", "engine")
def length_counts_the_tokens_of_a_session(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    engine, period = fixture.engine, fixture.period
    session = fixture.open(fixture.prompt(period + 30))
    assert_equal(engine.length(session), period + 31, "length of a session")
    for length in (period + 20, 16 * (period // 16) + 1, 16):
        engine.truncate(session, length)
        assert_equal(engine.length(session), length, f"length after truncate to {length} tokens")
        engine.extend(session, fixture.words(period + 5))
        fixture.generate(session, 10)
        assert_equal(engine.length(session), length + period + 15, "length after truncate, extend and generate")
    other = fixture.open(fixture.prompt())
    for wrong in subject.integers(len(fixture.tokens(session)) + 1, -1):
        with raises("PositionOutOfRange"):
            engine.truncate(session, wrong)
    fixture.generate(session, 10)
    engine.close(other)
    for name, more in (("generate", [1]), ("length", []), ("extend", [fixture.prompt(1)]), ("close", [])):
        with raises("SequenceNotFound"):
            getattr(engine, name)(other, *more)


@check("ENG-10bd", "engine")
def remove_joins_the_tokens_around_it(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    session = fixture.open(fixture.prompt(fixture.period + 30))
    for before, count in ((20, 4), (31, 16), (2, 1), (9, 0)):  # tokens that the canary attends to afterwards
        start = len(fixture.tokens(session)) - before
        fixture.engine.remove(session, start, start + count)
        fixture.generate(session, 10)
    length = len(fixture.tokens(session))
    for start, stop in ((length, length + 1), (5, 4)):
        with raises("PositionOutOfRange"):
            fixture.engine.remove(session, start, stop)
    fixture.generate(session, 10)


@check("ENG-10b", "engine")
def remove_of_whole_blocks_joins_the_tokens_around_them(subject: Subject) -> None:
    """An engine can cut whole blocks out of a block table, but it has to rotate the keys after them."""
    fixture = EngineFixture(subject)
    for start, stop in ((0, 16), (16, 48), (0, 64)):
        count = stop + fixture.period + 5
        if count < fixture.canary.context - 4:
            session = fixture.open(fixture.prompt(count))
            fixture.engine.remove(session, start, stop)
            fixture.generate(session, 4)


@check("ENG-10cd", "engine")
def load_restores_the_saved_tokens(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    engine, period = fixture.engine, fixture.period
    session = fixture.open(fixture.prompt(period + 7))
    fixture.generate(session, 3)
    saved, length = int(engine.save(session)), len(fixture.tokens(session))
    fixture.generate(session, 9)
    copy = int(engine.load(saved))
    assert_equal(len(fixture.tokens(copy)), length, "length of a loaded session")
    fixture.step([copy, session], 6)
    engine.close(session)
    engine.close(copy)
    fixture.generate(int(engine.load(saved)), max(period, LAP))
    other = fixture.open(fixture.prompt(period + 20))
    for count in (1, 2):
        copy = int(engine.load(saved))
        engine.extend(copy, fixture.words(count))
        fixture.step([other, copy], 9)
    with raises("SequenceNotFound"):
        engine.load(saved + 1)


@check("ENG-11ab", "engine")
def generate_stops_at_the_end_of_the_context(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    session = fixture.open(fixture.prompt())
    fixture.generate(session, fixture.room(session) - 2)
    with raises("CapacityExceeded"):
        fixture.engine.extend(session, fixture.prompt(2))
    with may_raise("CapacityExceeded"):
        assert_equal(len(fixture.engine.generate(session, 5)), 2, "number of generated tokens where the context has room for 2")
    if fixture.room(session):
        fixture.generate(session, 2)
    assert_equal(fixture.engine.length(session), fixture.canary.context, "length at the end of the context")


@check("ENG-11c", "engine")
def step_past_the_end_of_the_context_changes_no_session(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    full, other = fixture.open(fixture.prompt()), fixture.open(fixture.prompt())
    fixture.generate(full, fixture.room(full))
    for sessions in ([full], [other, full]):
        with raises("CapacityExceeded"):
            fixture.engine.step(sessions)
    assert_equal(fixture.engine.length(full), fixture.canary.context, "length at the end of the context")
    fixture.generate(other, 3)


@check("LAW-11", "engine")
def extend_with_an_invalid_token_raises(subject: Subject) -> None:
    fixture = EngineFixture(subject)
    prompt = fixture.prompt()
    session = fixture.open(prompt)
    for wrong in subject.integers(fixture.canary.vocabulary, -1, 10**6):
        with raises("TokenOutOfRange"):
            fixture.engine.extend(session, [*fixture.words(2), wrong])
        assert_equal(
            fixture.engine.length(session), len(prompt), f"length after extend with token {wrong} raised TokenOutOfRange"
        )
    with raises("PositionOutOfRange"):
        fixture.engine.generate(fixture.open(), 1)
    fixture.generate(session, 10)


@check("ENG-12", "engine")
def step_generates_no_token_of_another_session(subject: Subject) -> None:
    """Four sessions have disjoint sets of words."""
    fixture = EngineFixture(subject)
    share = fixture.canary.words // 4
    alphabets = [range(number * share, (number + 1) * share) for number in range(4)]
    sessions = [fixture.open(fixture.prompt(among=alphabet)) for alphabet in alphabets]
    for turn in range(6):
        fixture.step(sessions, 4)
        number = turn % 4
        fixture.engine.close(sessions[number])
        sessions[number] = fixture.open(fixture.prompt(among=alphabets[number]))


@check("ENG-13", "engine")
def generate_attends_to_exactly_the_window(subject: Subject) -> None:
    subject.require_size(window=1)
    for window in (16, 17, 31):
        fixture = EngineFixture(subject, window=window)
        session = fixture.open(fixture.prompt())
        fixture.engine.generate(session, min(fixture.period + 20, fixture.room(session)))


# LAW-18: engines of production sizes.

AT_ONCE = 512  # prompt tokens per call, because each call has a time limit of seconds


@check("LAW-18", "engine")
def generate_attends_to_hundreds_of_tokens_with_many_heads(subject: Subject) -> None:
    generate_with_long_periods(subject, heads=8, context=512)


@check("LAW-18", "engine", real=True)
def generate_attends_to_thousands_of_tokens_with_many_heads(subject: Subject) -> None:
    generate_with_long_periods(subject, heads=32, context=4096)


def generate_with_long_periods(subject: Subject, heads: int, context: int) -> None:
    """Two sessions generate with periods of many blocks, just below and just above a block boundary."""
    for period in (context // 2 - 1, context // 4 + 1):
        fixture = EngineFixture(
            subject, num_kv_heads=8, num_query_heads=heads, head_dim=128, context=context, period=period,
            cache_tokens=2 * subject.size("context", context),
        )  # fmt: skip
        prompts = [fixture.prompt(fixture.period + more) for more in (1, 20)]
        first, second = (
            fixture.open(*(prompt[at : at + AT_ONCE] for at in range(0, len(prompt), AT_ONCE))) for prompt in prompts
        )
        for _ in range(4):
            fixture.generate(first, 4)
        fixture.step([second, first], 6)
