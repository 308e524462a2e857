"""ENG: whole engines. Each clause is checked by the tokens that a canary model generates."""

from kvref_conformance.calls.derived_operations import refused_whole
from kvref_conformance.calls.messages import error_of
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.engine.fixture import EngineFixture
from kvref_conformance.outcome import Broken, NotOffered
from kvref_conformance.testlib.assertions import assert_equal, raises, true
from kvref_conformance.testlib.registry import check

MANY = 64  # sessions after which a cache counts as unbounded


@check("ENG-01a", "engine")
def a_period_is_repeated_to_the_end_of_the_context(subject: Subject) -> None:
    talk = EngineFixture(subject)
    session = talk.begin(talk.prompt())
    talk.goes_on(session, talk.canary.context - len(talk.told[session].tokens), "generating until the context is full")


@check("ENG-01b", "engine")
def what_came_next_is_recalled(subject: Subject) -> None:
    subject.need(recalls=1)
    talk = EngineFixture(subject, recalls=1)
    prompt = talk.prompt(40)
    session = talk.begin([*prompt, prompt[2]])
    talk.goes_on(session, len(prompt) - 3, "repeating its prompt after a second copy of the prompt's third token")


@check("ENG-02", "engine")
def together_they_say_what_each_says_alone(subject: Subject) -> None:
    talk = EngineFixture(subject)
    sessions = [talk.begin(talk.prompt(talk.canary.period + more)) for more in (0, 7, 16)]
    talk.together(sessions, 12, "in steps of three sessions of different lengths")
    talk.together(sessions[::-1][:2], 12, "in steps of two of the sessions, in another order")
    talk.together(sessions, 12, "in steps of all three sessions again")


@check("ENG-03", "engine")
def a_prompt_in_pieces_is_one_prompt(subject: Subject) -> None:
    for size in (1, 7, 16, 17):
        talk = EngineFixture(subject)
        prompt = talk.prompt()
        session = talk.begin(*(prompt[start : start + size] for start in range(0, len(prompt), size)))
        talk.goes_on(session, 20, f"after a prompt that was appended in chunks of size {size}")


@check("ENG-04", "engine")
def a_prefix_that_was_seen_says_what_a_new_one_says(subject: Subject) -> None:
    talk = EngineFixture(subject)
    period = talk.canary.period
    prompt = talk.prompt(period + 1)  # hardly more than the tokens that the canary attends to
    living = talk.begin(prompt)
    talk.goes_on(living, period, "the first session with this prompt")
    for length in (len(prompt), 33, 32, 17, 16, 15):  # on both sides of block boundaries
        session = talk.begin([*prompt[:length], *talk.prompt(period + 1)[length:]])
        talk.goes_on(session, period, f"a session that shares its first {length} tokens with another")
        talk.close(session)
    talk.close(living)
    again = talk.begin(prompt)
    talk.goes_on(again, period, "a session with the prompt of a closed session")
    other = talk.begin([*talk.prompt(15), *prompt[16:]])
    talk.goes_on(other, period, "a session whose prompt differs from a closed session's only in its first 16 tokens")


@check("ENG-04", "engine")
def two_go_on_together_from_one_that_was_there(subject: Subject) -> None:
    talk = EngineFixture(subject)
    period = talk.canary.period
    for more in (5, 12):  # the shared prefix ends inside a block
        first = talk.begin(talk.prompt(period + more))
        talk.goes_on(first, 3, "the first session with this prompt")
        tokens = talk.told[first].tokens
        talk.close(first)
        both = [talk.begin([*tokens, *talk.prompt(count)[1:]]) for count in (12, 4)]
        talk.together(both, period, "in steps of two sessions that begin with all tokens of a closed session")
        for session in both:
            talk.close(session)


@check("ENG-05a", "engine")
def one_that_is_cut_off_changes_no_other(subject: Subject) -> None:
    talk = EngineFixture(subject)
    staying, going = talk.begin(talk.prompt()), talk.begin(talk.prompt())
    talk.together([staying, going], 5, "in steps of two sessions, before one is closed")
    talk.close(going)
    talk.together([staying], 3, "after another session was closed")
    coming = talk.begin(talk.prompt(talk.canary.period + 1))
    talk.together([coming, staying], 20, "in steps with a session that was opened after another was closed")


@check("ENG-05b", "engine")
def one_that_is_cut_off_while_it_speaks_is_as_before(subject: Subject) -> None:
    talk = EngineFixture(subject)
    staying, going = talk.begin(talk.prompt()), talk.begin(talk.prompt(talk.canary.period + 9))
    for count in (1, 8, talk.canary.period):
        talk.engine.cancel(going, count)
        talk.together([staying], 2, f"after cancel stopped another session's generation of {count} tokens")
        coming = talk.begin(talk.prompt(talk.canary.period + 1))
        talk.together(
            [coming, staying, going], 7, f"in steps of three sessions, one of which was cancelled while generating {count} tokens"
        )
        talk.close(coming)


@check("ENG-06ab", "engine")
def more_than_the_cache_holds_is_refused_or_right(subject: Subject) -> None:
    talk = EngineFixture(subject, cache_tokens=3 * subject.size("context", 128))
    sessions = list[int]()
    for _ in range(MANY):
        try:
            sessions.append(talk.begin(talk.prompt(talk.canary.period + 15)))
            talk.goes_on(sessions[-1], 3, f"session {len(sessions)} of the sessions that were opened until the cache is full")
        except (Broken, NotOffered):
            raise
        except Exception as error:
            true(error_of(error).kind == "OutOfBlocks", "the error that a full cache raises", "OutOfBlocks", type(error).__name__)
            break
    else:  # the engine swaps sessions out, or keeps no cache between calls
        try:
            talk.together(sessions, 2, f"in steps of {MANY} sessions, more than the cache was created for")
        except (Broken, NotOffered):
            raise
        except Exception as error:
            true(error_of(error).kind == "OutOfBlocks", "the error that a full cache raises", "OutOfBlocks", type(error).__name__)
            for session in sessions:
                _goes_on_or_waits(talk, session, f"after a step of {MANY} sessions raised OutOfBlocks")
        return
    true(
        len(sessions) >= 2,
        "number of sessions before a cache for three full contexts raised OutOfBlocks",
        "at least 2",
        len(sessions),
    )
    for session in sessions:
        _goes_on_or_waits(talk, session, "in a full cache")
    talk.close(sessions.pop(0))
    talk.close(sessions.pop(0))
    session = talk.begin(talk.prompt())
    talk.goes_on(session, 10, "in a new session after two sessions of a full cache were closed")
    for session in sessions:
        _goes_on_or_waits(talk, session, "after two other sessions of a full cache were closed")


def _goes_on_or_waits(talk: EngineFixture, session: int, what: str) -> None:
    """Check that the session generates the right tokens or raises OutOfBlocks."""
    try:
        talk.goes_on(session, 5, what)
    except (Broken, NotOffered):
        raise
    except Exception as error:
        true(error_of(error).kind == "OutOfBlocks", "the error that a full cache raises", "OutOfBlocks", type(error).__name__)


@check("ENG-07a", "engine")
def a_conversation_goes_on(subject: Subject) -> None:
    talk = EngineFixture(subject)
    session = talk.begin(talk.prompt())
    for turn in range(4):
        talk.goes_on(session, 7, f"in turn {turn} of a conversation")
        talk.tell(session, talk.prompt(3 + turn)[1:])
    talk.goes_on(session, talk.canary.period, "after the last turn of a conversation")


@check("ENG-07b", "engine")
def an_early_turn_may_be_another(subject: Subject) -> None:
    talk = EngineFixture(subject)
    prompt = talk.prompt(talk.canary.period + 20)
    session = talk.begin(prompt)
    talk.goes_on(session, 10, "in a first conversation")
    for place in (25, 40, len(prompt) - 2):
        changed = [*prompt[:place], *talk.prompt(1)[1:], *prompt[place + 1 :]]
        talk.goes_on(talk.begin(changed), 25, f"in a conversation that differs from the first one only in token {place}")
    talk.goes_on(session, 20, "in the first conversation, after others that differ from it in one token")


@check("ENG-08a", "engine")
def forks_go_their_own_ways(subject: Subject) -> None:
    talk = EngineFixture(subject)
    for more in (0, 5, 14):  # last block full, partly filled, one slot free
        parent = talk.begin(talk.prompt(talk.canary.period + more))
        child = talk.fork(parent)
        grandchild = talk.fork(child)
        talk.tell(child, talk.prompt(2)[1:])
        talk.tell(parent, talk.prompt(1)[1:])
        family = [parent, grandchild, child]
        for session in family:
            talk.goes_on(session, 9, f"after two forks of a prompt of one period and {more} tokens")
        talk.close(parent)
        for session in (child, grandchild):
            talk.goes_on(session, 15, "in a fork whose parent was closed")
            talk.close(session)


@check("ENG-08b", "engine")
def several_answers_to_one_prompt_are_one(subject: Subject) -> None:
    talk = EngineFixture(subject)
    other = talk.begin(talk.prompt())
    for more, n in ((0, 2), (5, 3), (14, 2)):
        session = talk.begin(talk.prompt(talk.canary.period + more))
        talk.sample(session, n, 19, f"sampled after a prompt of one period and {more} tokens")
        talk.together([other, session], 9, "in steps of another session and one that was sampled")
        talk.sample(session, n, 3, "sampled after the session generated tokens itself")
        talk.close(session)


@check("ENG-09", "engine")
def a_draft_that_is_taken_back_leaves_nothing(subject: Subject) -> None:
    talk = EngineFixture(subject)
    session = talk.begin(talk.prompt())
    for length in (1, 3, 16, 5):
        before = len(talk.told[session].tokens)
        talk.tell(session, talk.prompt(length)[1:])
        talk.truncate(session, before)
        talk.goes_on(session, 6, f"after a draft of {length} tokens was appended and truncated")


@check("ENG-10ad", "engine")
def a_session_is_a_list_of_tokens(subject: Subject) -> None:
    talk = EngineFixture(subject)
    session = talk.begin(talk.prompt(talk.canary.period + 30))
    assert_equal(talk.engine.length(session), len(talk.told[session].tokens), "length of a session")
    for length in (talk.canary.period + 20, 16 * (talk.canary.period // 16) + 1, 16):
        talk.truncate(session, length)
        assert_equal(talk.engine.length(session), length, f"length after truncate to {length} tokens")
        talk.tell(session, talk.prompt()[1:])
        talk.goes_on(session, 10, f"after truncate to {length} tokens and extend")
        assert_equal(
            talk.engine.length(session),
            length + talk.canary.period + 15,
            f"length after truncate to {length} tokens, extend and generate",
        )
    other = talk.begin(talk.prompt())
    true(other != session, "the number of a second session", f"a number other than {session}", other)
    before = talk.engine.length(session)
    for wrong in subject.integers(before + 1, -1):
        with raises("PositionOutOfRange"):
            talk.engine.truncate(session, wrong)
    talk.goes_on(session, 10, "after an invalid truncate raised PositionOutOfRange")
    talk.close(other)
    for name, more in (("generate", [1]), ("length", []), ("extend", [talk.prompt(1)]), ("close", [])):
        with raises("SequenceNotFound"):
            getattr(talk.engine, name)(other, *more)


@check("ENG-10bd", "engine")
def tokens_may_go_from_the_middle(subject: Subject) -> None:
    talk = EngineFixture(subject)
    session = talk.begin(talk.prompt(talk.canary.period + 30))
    for before, count in ((20, 4), (31, 16), (2, 1), (9, 0)):  # tokens that the canary attends to afterwards
        start = len(talk.told[session].tokens) - before
        talk.remove(session, start, start + count)
        talk.goes_on(session, 10, f"after remove of {count} tokens that start {before} tokens before the end")
    length = len(talk.told[session].tokens)
    for start, stop in ((length, length + 1), (5, 4)):
        with raises("PositionOutOfRange"):
            talk.engine.remove(session, start, stop)
    talk.goes_on(session, 10, "after an invalid remove raised PositionOutOfRange")


@check("ENG-10cd", "engine")
def what_was_saved_is_as_it_was(subject: Subject) -> None:
    talk = EngineFixture(subject)
    session = talk.begin(talk.prompt(talk.canary.period + 7))
    talk.goes_on(session, 3, "before save")
    saved, then = int(talk.engine.save(session)), talk.told[session].copy()
    talk.goes_on(session, 9, "after save")
    beside = talk.load(saved, then)
    talk.together([beside, session], 6, "in steps of a loaded session and the session that was saved")
    talk.close(session)
    talk.close(beside)
    other = talk.begin(talk.prompt(talk.canary.period + 20))
    for number in range(2):
        again = talk.load(saved, then)
        talk.tell(again, talk.prompt(1 + number)[1:])
        talk.together([other, again], 9, "in steps of another session and one that was loaded after two were closed")
    with raises("SequenceNotFound"):
        talk.engine.load(saved + 1)


@check("ENG-11ab", "engine")
def the_end_of_the_context_stops_it(subject: Subject) -> None:
    talk = EngineFixture(subject)
    session = talk.begin(talk.prompt())
    talk.goes_on(
        session,
        talk.canary.context - len(talk.told[session].tokens) - 2,
        "generating until 2 tokens before the end of the context",
    )
    with raises("CapacityExceeded"):
        talk.engine.extend(session, talk.prompt(2))
    try:
        said = [int(token) for token in talk.engine.generate(session, 5)]
        true(
            len(said) == 2,
            "number of tokens that generate returned when the context had room for 2",
            "2, or CapacityExceeded",
            len(said),
        )
        talk.hold(session, said, "at the end of the context")
    except (Broken, NotOffered):
        raise
    except Exception as error:
        refused_whole(error)
        true(
            error_of(error).kind == "CapacityExceeded",
            "the error of generate past the end of the context",
            "CapacityExceeded",
            type(error).__name__,
        )
        talk.goes_on(session, 2, "generating the last 2 tokens of the context, after CapacityExceeded")
    assert_equal(talk.engine.length(session), talk.canary.context, "length at the end of the context")


@check("ENG-11c", "engine")
def a_step_past_the_end_of_the_context_changes_no_session(subject: Subject) -> None:
    talk = EngineFixture(subject)
    full, other = talk.begin(talk.prompt()), talk.begin(talk.prompt())
    talk.goes_on(full, talk.canary.context - len(talk.told[full].tokens), "generating until the end of the context")
    for sessions in ([full], [other, full]):
        with raises("CapacityExceeded"):
            talk.engine.step(sessions)
    assert_equal(talk.engine.length(full), talk.canary.context, "length at the end of the context")
    talk.goes_on(other, 3, "after a step with a session at the end of its context raised CapacityExceeded")


@check("LAW-11", "engine")
def a_token_that_there_is_not_is_refused(subject: Subject) -> None:
    talk = EngineFixture(subject)
    session = talk.begin(talk.prompt())
    for wrong in subject.integers(talk.canary.vocabulary, -1, 10**6):
        with raises("TokenOutOfRange"):
            talk.engine.extend(session, [*talk.prompt(2)[1:], wrong])
        assert_equal(
            talk.engine.length(session),
            len(talk.told[session].tokens),
            f"length after extend with token {wrong} raised TokenOutOfRange",
        )
    with raises("PositionOutOfRange"):
        talk.engine.generate(int(talk.engine.open()), 1)
    talk.goes_on(session, 10, "after invalid tokens were rejected")


@check("ENG-12", "engine")
def no_session_says_anothers_token(subject: Subject) -> None:
    talk = EngineFixture(subject)
    share = talk.canary.words // 4
    alphabets = [range(number * share, (number + 1) * share) for number in range(4)]
    sessions = [talk.begin(talk.prompt(among=alphabet)) for alphabet in alphabets]
    for turn in range(6):
        talk.together(sessions, 4, "in steps of four sessions with disjoint sets of words")
        number = turn % 4
        talk.close(sessions[number])
        sessions[number] = talk.begin(talk.prompt(among=alphabets[number]))


@check("ENG-13", "engine")
def a_window_sees_exactly_its_tokens(subject: Subject) -> None:
    subject.need(window=1)
    for window in (16, 17, 31):
        talk = EngineFixture(subject, window=window)
        session = talk.begin(talk.prompt())
        room = talk.canary.context - len(talk.told[session].tokens)
        talk.goes_on(session, min(talk.canary.period + 20, room), f"with a window of {talk.engine.config['window']} tokens")


# LAW-18: engines of production sizes.

AT_ONCE = 512  # prompt tokens per call, because each call has a time limit of seconds


@check("LAW-18", "engine")
def hundreds_of_tokens_are_read_by_many_heads(subject: Subject) -> None:
    _two_talk(subject, heads=8, context=512)


@check("LAW-18", "engine", real=True)
def thousands_of_tokens_are_read_by_many_heads(subject: Subject) -> None:
    _two_talk(subject, heads=32, context=4096)


def _two_talk(subject: Subject, heads: int, context: int) -> None:
    """Two sessions generate with periods of many blocks, just below and just above a block boundary."""
    for period in (context // 2 - 1, context // 4 + 1):
        talk = EngineFixture(
            subject, num_kv_heads=8, num_query_heads=heads, head_dim=128, context=context, period=period,
            cache_tokens=2 * subject.size("context", context),
        )  # fmt: skip
        prompts = [talk.prompt(talk.canary.period + more) for more in (1, 20)]
        first, second = (talk.begin(*(prompt[at : at + AT_ONCE] for at in range(0, len(prompt), AT_ONCE))) for prompt in prompts)
        for _ in range(4):
            talk.goes_on(first, 4, f"with a period of {talk.canary.period} tokens")
        talk.together([second, first], 6, "in steps of two long sessions")
