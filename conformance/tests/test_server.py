"""OpenAI-compatible servers, correct and misbehaving ones, judged with a canary over HTTP."""

import re
from collections import Counter
from pathlib import Path

import pytest
from commandline import kvref
from fake_server import MODEL, serving

from kvref.canary import BOS, EOS, FIRST_WORD, Oracle, sized
from kvref.errors import OutOfBlocks, PositionOutOfRange
from kvref_canary.files import huggingface
from kvref_canary.server.errors import ServerError
from kvref_canary.server.url import Address
from kvref_conformance.exceptions import CannotRun, NotOffered
from kvref_conformance.implementations.server import ServerImplementation
from kvref_conformance.runner.check_runner import CheckRunner, Failure
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import all_checks

__all__ = ["kvref"]

SIZES = {"num_layers": 2, "num_kv_heads": 2, "num_query_heads": 2, "head_dim": 32, "context": 80, "period": 12}
CANARY = sized(**SIZES)
PROMPT = [BOS, *range(FIRST_WORD, FIRST_WORD + 20)]
RIGHT = (PROMPT[-12:] * 3)[:20]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of the canary."""
    path = tmp_path_factory.mktemp("canary")
    huggingface.write_folder(path, huggingface.make_files(CANARY))
    return path


@pytest.fixture
def met(files):
    """Start the fake server and an implementation connected to it; stop both at the end."""
    running = []

    def meet(wrong="", model=None, path=""):
        server = serving(CANARY, wrong)
        fake = server.__enter__()
        running.append(server)
        served = ServerImplementation(Address(fake.url + path, files, model))
        running[-1:] = [served, server]
        return fake, served

    yield meet
    for each in running:
        each.close() if isinstance(each, ServerImplementation) else each.__exit__(None, None, None)


def session(served, *prompts):
    engine = served.engine(100, **SIZES)
    for prompt in prompts or (PROMPT,):
        engine.extend(engine.open(), prompt)
    return engine


@pytest.mark.parametrize(
    ("wrong", "told_by"),
    [
        ("", "token ids"), ("ids not taken", "text"), ("adds no begin-of-text", "text"), ("chat only", "chat"),
        ("no usage", "token ids"), ("no spaces", "token ids"), ("leading space", "token ids"), ("no models", "token ids"),
        ("unknown parameters", "token ids"),
        ("no DONE", "token ids"), ("no reason", "token ids"), ("429", "token ids"), ("n when warm", "token ids"),
    ],
)  # fmt: skip
def test_a_right_server_says_the_right_tokens_in_whichever_way_it_works(met, wrong, told_by):
    fake, served = met(wrong)
    assert served.language == f"{told_by} over HTTP" and served.version == "fake/1"
    assert served.limits == {"engine": {**SIZES, "window": 0, "recalls": 0, "recurrent": 0}}
    engine = session(served, PROMPT, PROMPT[:15], PROMPT[:18])
    assert [engine.generate(0, 10), engine.generate(0, 10)] == [RIGHT[:10], RIGHT[10:]]  # in one reply, and streamed
    assert engine.step([1, 2, 0]) == [PROMPT[3], PROMPT[6], PROMPT[17]]
    assert engine.sample(1, 3, 4) == PROMPT[4:8] * 3
    engine.cancel(1, 40)
    assert engine.length(1) == 16 and engine.generate(1, 2) == PROMPT[4:6]
    assert {body.get("stream", False) for body in fake.asked} == {False, True}
    assert all(body["temperature"] == 0 or "n" in body for body in fake.asked)
    assert ("skip_special_tokens" in fake.asked[-1]) == (wrong != "unknown parameters")


def test_several_prompts_are_asked_at_once(met):
    fake, served = met("slow")
    engine = session(served, *[PROMPT] * 4)
    before = len(fake.asked)
    engine._background.run(_hang_up(engine), lambda: len(fake.asked) == before + 4 and fake.ended.set())
    assert len(fake.asked) == before + 4


async def _hang_up(engine):
    import asyncio

    await asyncio.gather(*(engine._asker.generate(PROMPT, 3) for _ in range(4)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("503", "HTTP 503: over loaded"),
        ("429 always", "HTTP 429: slow down"),
        ("redirect", r"HTTP 307: a redirect to http://\S+invalid/v1/completions, which is not followed"),
        ("dies", "the connection was lost: |no connection: "),
        ("not JSON", "expected JSON, got <html>Bad gateway</html>"),
        ("deep JSON", r"expected JSON, got \[\["),
        ("huge", "a reply of more than [0-9,]+ bytes"),
        ("hostile text", r"text: expected words of 4 letters such as baba, got '\\x1b\[2J\\u202e"),
        ("no choices", "expected a completion, got "),
        ("an empty list", "the answer contains no choice"),
        ("an index without end", "expected a completion, got "),
        ("a phrase", r"HTTP 500: \[31mred \]0;t$"),
        ("stops early", "expected 20 tokens, got 10; finish_reason length"),
        ("half a line", "expected JSON, got "),
        ("error in a stream", "the server returned an error instead of an answer: out of memory"),
        ("breaks off", r"the stream ended without \[DONE\] and without a finish_reason"),
        ("endless stream", "a reply of more than [0-9,]+ bytes"),
        ("wrong model", f"expected an answer of model {MODEL}, got one of other"),
    ],
)
def test_what_is_no_completion_costs_one_line(met, wrong, said):
    _fake, served = met(wrong)
    engine = session(served, *[PROMPT] * 6)

    def speak():
        for each in range(6):
            engine.generate(each, 20)

    with pytest.raises((ServerError, OutOfBlocks), match=said) as caught:  # the second one if there is no room at the moment
        speak()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_bytes_that_go_on_dripping_are_no_answer(met):
    _fake, served = met("drips")
    engine = session(served, *[PROMPT] * 6)
    served.asker.client.silence = 0.3
    with pytest.raises(ServerError, match=r"the answer was not complete within 0\.3 s"):
        [engine.generate(each, 20) for each in range(6)]


def test_fewer_answers_than_before_are_too_few(met):
    fake, served = met()
    engine = session(served)
    assert engine.sample(0, 3, 4) == RIGHT[:4] * 3
    fake.wrong = "n ignored"
    with pytest.raises(ServerError, match="expected 3 answers, as to earlier requests, got 1"):
        engine.sample(0, 3, 4)


def test_steps_are_long_requests_now_and_then(met):
    fake, served = met()
    engine = session(served, PROMPT, PROMPT[:15])
    before = len(fake.asked)
    said = [engine.step([0, 1]) for _ in range(20)]
    assert said == [list(pair) for pair in zip(RIGHT, (PROMPT[3:15] * 3)[:20], strict=True)]
    counts = [body["max_tokens"] for body in fake.asked[before:]]
    assert set(counts) == {1, CANARY.period}
    engine.extend(1, PROMPT[5:6])  # tokens generated ahead are no longer the next ones
    told = [*PROMPT[:15], *(token for _, token in said), PROMPT[5]]
    assert engine.step([1]) == Oracle(CANARY).extend(told)[-1:]


def test_a_server_that_does_not_answer_is_given_up(met):
    fake, served = met("slow")
    engine = session(served)

    def impatient():
        if len(fake.asked) > 8:
            raise InterruptedError  # like an alarm

    def speak():
        while True:
            engine._background.run(engine._asker.generate(PROMPT, 2), impatient)

    with pytest.raises(InterruptedError):
        speak()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("merges words", "the model is not this canary"),
        (
            "another tokenizer",
            "the server counts 58 tokens in a prompt of 18, sent as (chat|token ids): its tokenizer is not this canary's",
        ),
        ("two models", "--model: expected one of tiny-canary, other, which the server lists"),
        (
            "text not answered",
            r"prompt as token ids: HTTP 422: prompt: expected a string; prompt as text: .*; expected an OpenAI",
        ),
        ("short context", r"the server rejects a prompt of 72 tokens: HTTP 400: this model's maximum .* \(--context\)"),
    ],
)
def test_a_server_without_the_canary_is_not_judged(met, wrong, said):
    with pytest.raises(CannotRun, match=said) as caught:
        met(wrong)
    assert "\n" not in str(caught.value)


def test_nobody_there_and_nothing_there(met, files):
    with pytest.raises(CannotRun, match=r"^http://127.0.0.1:9/v1: no connection: "):
        ServerImplementation(Address("http://127.0.0.1:9/v1", files))
    with pytest.raises(CannotRun, match=r"HTTP 404: no such path; expected an OpenAI-compatible API at "):
        met(path="/v2")
    with pytest.raises(CannotRun, match=r"no is not a canary: expected a folder with a canary.json"):
        ServerImplementation(Address("http://127.0.0.1:9/v1", Path("no")))


def test_of_two_models_one_is_named(met):
    fake, _ = met("two models", MODEL)
    assert {body["model"] for body in fake.asked} == {MODEL}


@pytest.mark.parametrize("wrong", ["no n", "n ignored"])
def test_one_answer_where_several_were_asked_for_is_not_offered(met, wrong):
    engine = session(met(wrong)[1])
    assert len(engine.sample(0, 1, 2)) == 2  # shows nothing about several answers
    with pytest.raises(NotOffered, match="several answers to one request: "):
        engine.sample(0, 3, 2)
    assert engine.sample(0, 0, 2) == engine.sample(0, 3, 0) == []
    with pytest.raises(PositionOutOfRange):
        engine.sample(0, 2, -1)


def test_a_server_that_stops_before_the_end_is_judged_up_to_there(met):
    _fake, served = met("stops before the end")
    assert served.limits["engine"]["context"] == 79
    engine = session(served)
    assert len(engine.generate(0, 79 - len(PROMPT))) == 58
    with pytest.raises(NotOffered, match="more tokens than the context has room for"):
        engine.generate(0, 1)


def test_a_wrong_special_token_is_in_the_answer(met):
    """By default servers omit it from the text, and the answer would only be too short."""
    _, served = met("an end token")
    answers = [session(served, PROMPT).generate(0, 3) for _ in range(12)]  # it misbehaves after the first contact
    assert answers[-1] == [*RIGHT[:2], EOS]


def test_what_the_server_puts_in_front_is_not_sent(met):
    fake, served = met("ids not taken")
    assert fake.asked[-1]["prompt"].startswith("baba deba ")
    with pytest.raises(NotOffered, match="does not begin with the token <s>"):
        session(served, PROMPT[1:]).generate(0, 1)


def written(clause):
    """The hand-written checks of a clause."""
    return [each for each in all_checks() if each.family == "engine" and each.run and not each.option and each.clause in clause]


def test_a_right_server_passes(met):
    judge = CheckRunner(met()[1])
    said = [judge.run_check(check) for check in written(["ENG-02", "ENG-05", "ENG-08"])]
    assert not any(isinstance(each, Failure) for each in said)
    found = Counter((each.verdict, each.missing) for each in said)
    missing = {("not offered", f"engine.{operation}"): 1 for operation in ("fork", "save")}
    assert found == {("passed", ""): len(said) - 2, **missing}


@pytest.mark.parametrize(
    ("wrong", "clause", "got"),
    [
        ("a wrong token", "ENG-02", r"\[.*\]"),
        ("another's tokens", "ENG-12", r"\[.*\]"),
        ("prefix cache", "ENG-07", r"\[.*\]"),
        ("503", "ENG-03", "OutOfBlocks: HTTP 503: over loaded"),
    ],
)
def test_a_wrong_server_breaks_its_clause(met, wrong, clause, got):
    judge = CheckRunner(met(wrong)[1], Effort(timeout=20))
    failures = [each for each in map(judge.run_check, written([clause])) if isinstance(each, Failure)]
    assert failures and all(re.fullmatch(got, each.violation.got) and not each.violation.where for each in failures)


def test_a_hung_server_costs_its_clause(met):
    judge = CheckRunner(met("slow")[1], Effort(timeout=1))
    (failure,) = map(judge.run_check, written(["ENG-03"]))
    assert failure.violation.expected == "a reply within 1 s"


def test_a_failure_on_the_command_line_is_replayed_by_its_trace_alone(kvref, files, tmp_path):
    with serving(CANARY, "long prompts") as fake:
        done = kvref("check", "--server", fake.url, "--canary", str(files), "--examples", "2", "--clause", "ENG-01")
        assert (done.returncode, done.stderr) == (1, "failed: ENG-01 · A period is repeated\n")
        assert f"  again    kvref check 'server:{fake.url} --canary {files}' --clause ENG-01" in done.stdout
        assert "tiny-canary fake/1 (token ids over HTTP, exact)" in " ".join(done.stdout.split())
        (trace,) = (tmp_path / ".kvref/failures").iterdir()
        done = kvref("replay", str(trace))
        assert done.returncode == 1 and "first mismatch at line" in done.stdout
        fake.wrong = ""
        again = kvref("replay", str(trace), "--server", fake.url, "--canary", str(files))
    assert again.returncode == 0 and again.stdout.splitlines()[-1] == "every reply is as expected"
