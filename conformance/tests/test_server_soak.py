"""kvref soak --server: many concurrent requests to correct and wrong servers, and the counts."""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import islice

import pytest
from commandline import kvref
from fake_server import serving
from rich.console import Console

from kvref.canary import Canary, sized
from kvref.canary.hybrid import HybridCanary
from kvref_canary.files import huggingface, vocabulary
from kvref_canary.files.hybrid import make_hybrid_files
from kvref_canary.server.url import Address
from kvref_conformance.commands.soak_server import _print_verdict
from kvref_conformance.implementations.server import ServerImplementation
from kvref_conformance.soak.server_console import _report_lines
from kvref_conformance.soak.server_soak import ServerSoak
from kvref_conformance.soak.server_statistics import MAX_POINTS, Latencies, ServerStatistics, Timeline
from kvref_conformance.soak.server_workload import KINDS, RequestWorkload

__all__ = ["kvref"]

CANARY = sized(num_layers=2, num_kv_heads=2, num_query_heads=2, head_dim=32, context=120, period=12)
RECALLS = Canary((1,), True, theta=1e6, head_dim=128, context=256)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("canary")
    huggingface.write_folder(path, huggingface.make_files(CANARY))
    return path


def soaked(files, wrong, seconds=1.5, canary=CANARY):
    """The figures of a soak of a fake server with one misbehavior."""
    with serving(canary, wrong) as fake:
        served = ServerImplementation(Address(fake.url, files))
        try:
            soak = ServerSoak(served.asker, 0, 6)
            served.background.run(soak.run(seconds))
            soak.explain()
        finally:
            served.close()
    return soak.figures


def test_a_right_server_keeps_every_token(kvref, files, tmp_path):
    with serving(CANARY) as fake:
        # long enough for a prefix hit on a busy machine
        arguments = ("--server", fake.url, "--canary", str(files), "--minutes", "0.08", "--concurrency", "5")
        done = kvref("soak", *arguments, "--json", "out.json", "--plot", "out.svg")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "tiny-canary fake/1 (token ids over HTTP), 5 requests at a time"
    assert " checked tokens were right" in done.stdout.splitlines()[-1] and "prefix hits: " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["tokens_checked"] > 0 and said["wrong"] == [] and said["failed"] == {} and not said["interrupted"]
    assert sum(said["requests"].values()) > 5 and said["total"]["p50"] > 0
    drawn = ElementTree.parse(tmp_path / "out.svg").getroot()
    assert len(drawn.findall(".//{*}path")) >= 3


@pytest.mark.extended
@pytest.mark.parametrize("wrong", ["another's tokens", "prefix cache"])
def test_wrong_tokens_are_counted_and_whose_they_were_is_said(files, wrong):
    figures = soaked(files, wrong, 6.0)  # long enough for many requests under load
    assert figures.wrong_tokens >= figures.wrong_requests > 0 and not figures.failed
    assert sum(each.wrong for each in figures.timeline.moments) == figures.wrong_tokens
    assert figures.wrong and all(each.finding.startswith(("request ", "either ")) for each in figures.wrong)
    if wrong == "another's tokens":
        assert any(", which had ended, instead of" in each.finding for each in figures.wrong)


def test_the_kinds_of_requests_beside_every_wrong_answer_are_counted(files, monkeypatch):
    monkeypatch.setattr("kvref_conformance.soak.server_workload.KINDS", {"new": 3, "several": 1})
    figures = soaked(files, "a sampler beside several answers", 3.0)
    assert figures.wrong_requests > 0 and figures.right_requests > 0
    assert figures.beside_wrong["several answers"] == figures.wrong_requests
    assert "several answers" in {kind for each in figures.wrong for kind in (each.kind + " answers", *each.beside)}


def test_a_suspect_was_beside_every_wrong_answer_and_beside_few_right_ones():
    figures = ServerStatistics(
        wrong_requests=8, beside_wrong=Counter({"several answers": 8, "goes on": 8, "long": 7}),
        right_requests=40, beside_right=Counter({"several answers": 6, "goes on": 36}),
    )  # fmt: skip
    assert figures.suspects == figures.document()["beside_every_wrong_answer"] == {"several answers": 15.0}
    (line,) = (line for line in _report_lines(figures) if "beside" in line)
    assert line.startswith("a request of kind 'several answers' was in flight beside every wrong answer, and beside 15 % of the")
    figures.right_requests = 3
    assert figures.suspects == {}


@pytest.mark.parametrize("architecture", ["lfm2", "falcon-h1"])
def test_a_hybrid_model_with_right_states_passes(tmp_path, architecture):
    huggingface.write_folder(tmp_path, make_hybrid_files(architecture))
    figures = soaked(tmp_path, "", 2.0, HybridCanary(architecture))
    assert figures.tokens_checked > figures.wrong_tokens == 0 and not figures.failed


@pytest.mark.extended
def test_a_stale_state_of_a_hybrid_model_is_named(tmp_path):
    huggingface.write_folder(tmp_path, make_hybrid_files("qwen3.5"))
    figures = soaked(tmp_path, "a stale matrix", 6.0, HybridCanary("qwen3.5"))
    assert figures.wrong_tokens > 0 and not figures.failed
    named = [f"the state of the matrix is of 5 tokens before, at token {each.prompt}" for each in figures.wrong]
    assert {each.finding for each in figures.wrong} & set(named)


@pytest.mark.parametrize("wrong", ["", "another's tokens"])
def test_what_was_heard_of_an_answer_that_is_cut_off_is_looked_at_too(files, monkeypatch, wrong):
    monkeypatch.setattr("kvref_conformance.soak.server_workload.KINDS", {"cut off": 1})
    figures = soaked(files, wrong, 2.0)
    assert figures.tokens_checked > 0 and not figures.failed
    assert bool(figures.wrong_tokens) == bool(wrong)


def test_a_text_that_ends_within_a_word_has_the_words_before_it():
    text = vocabulary.to_text(CANARY, [5, 7, 9])
    each = len(vocabulary.word_of(CANARY, 5)) + 1
    for end in range(len(text) + 1):
        assert vocabulary.to_tokens_of_prefix(CANARY, text[:end]) == [5, 7, 9][: (end + 1) // each]
    with pytest.raises(vocabulary.NotCanaryWords):
        vocabulary.to_tokens_of_prefix(CANARY, "What is a cache?")


@pytest.mark.parametrize(("refused", "verdict"), [(10, 0), (11, 2)])
def test_a_server_that_is_mostly_full_is_not_judged(capsys, refused, verdict):
    figures = ServerStatistics(requests=Counter(new=10), tokens_checked=99, refused=refused)
    assert _print_verdict(Console(), figures, interrupted=False) == verdict
    last = capsys.readouterr().out.splitlines()[-1]
    rejected = "not judged: the server rejected 11 of 21 requests because it had no room"
    assert last == (rejected if verdict else "passed: all 99 checked tokens were right")


def test_a_server_that_dies_ends_the_run(files):
    figures = soaked(files, "dies", 60.0)
    assert figures.gone and figures.seconds < 30 and set(figures.failed) <= {"no connection", "broken off"}


@pytest.mark.parametrize(
    ("wrong", "refused", "failed"),
    [
        ("503", True, set()),
        ("stops early", False, {"another count"}),
        pytest.param("not JSON", False, {"no JSON"}, marks=pytest.mark.extended),
        pytest.param("no n", False, set(), marks=pytest.mark.extended),
    ],
)
def test_what_is_no_answer_is_counted_by_kind(files, wrong, refused, failed):
    figures = soaked(files, wrong, 3.0)  # long enough for each kind of request, also on a busy machine
    assert (figures.refused > 0, set(figures.failed), figures.wrong_tokens) == (refused, failed, 0)
    assert set(figures.examples) == failed
    assert "several" not in figures.requests or wrong != "no n"


def test_ctrl_c_gives_what_was_found_until_then(files, tmp_path):
    with serving(CANARY) as fake:
        command = [sys.executable, "-m", "kvref_conformance.cli", "soak", "--server", fake.url, "--canary", str(files)]
        run = subprocess.Popen(
            [*command, "--minutes", "9"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        while len(fake.asked) < 20:
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=100)
    assert (run.returncode, err) == (130, "")
    assert " tokens checked in " in out and out.splitlines()[-1] == "interrupted: these are the results until the interruption"


@pytest.mark.parametrize("canary", [CANARY, RECALLS], ids=["offsets", "recalls"])
def test_a_workload_has_everything_in_it_and_room_for_it(canary):
    """If the oracle answers, every token is right and hardly any is uncertain."""
    workload, kinds, uncertain, said = RequestWorkload(canary, 0), set(), 0, 0
    for request in islice(iter(workload.draw, None), 30 if canary.recalls else 60):
        kinds.add(request.kind)
        assert 1 <= request.count <= canary.context - len(request.prompt)
        assert request.prompt[: request.shared] == request.base.tokens[: request.shared]
        assert request.shared < len(request.prompt)
        answer = []
        right, oracle = workload.expected_tokens(request, [canary.words] * request.count)
        for _ in range(request.count):
            right, oracle = workload.expected_tokens(request, [*answer, 0])
            answer.append(right[-1] if right[-1] is not None else 5)
            uncertain += right[-1] is None
        said += request.count
        right, oracle = workload.expected_tokens(request, answer)
        assert all(want in (None, got) for want, got in zip(right, answer, strict=True))
        workload.add_answer(request, answer, oracle)
    assert kinds == set(KINDS)
    assert uncertain < said * 0.3


def test_the_same_seed_draws_the_same():
    drawn = [[each.prompt for each in islice(iter(RequestWorkload(CANARY, seed).draw, None), 5)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_latencies_and_times_take_no_more_room_with_time():
    latencies, timeline = Latencies(), Timeline()
    for number in range(1, 1001):
        latencies.add(number / 1000)
        timeline.at(number * 10).tokens += 1
    assert latencies.percentile(50) == pytest.approx(0.5, rel=0.03) and latencies.percentile(99) == pytest.approx(0.99, rel=0.03)
    assert Latencies().percentile(50) is None
    assert len(timeline.moments) <= MAX_POINTS and timeline.width == 32
    assert sum(each.tokens for each in timeline.moments) == 1000
    assert json.dumps(ServerStatistics().document())
