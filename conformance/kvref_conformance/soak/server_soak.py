"""A server under load: many concurrent requests, and every token compared with the canary's right one."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvref_canary.diagnosis.case import RequestHistory
from kvref_canary.diagnosis.explanation import explain_tokens
from kvref_canary.server.completions import Completion, CompletionClient
from kvref_canary.server.errors import ServerError
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.soak.server_statistics import ServerStatistics, WrongAnswer
from kvref_conformance.soak.server_workload import CompletionRequest, RequestWorkload

MAX_EXPLAINED = 3  # number of wrong answers to diagnose
MAX_OTHERS = 24  # recently ended requests whose tokens a wrong answer may contain
MAX_SHOWN = 16  # tokens from the first wrong one on
PAUSE_AFTER_FAILURE = 0.1  # seconds that a worker pauses
FAILURES_UNTIL_GONE = 10  # consecutive failures to connect, per worker, after which a server counts as gone


@dataclass(frozen=True)
class WrongCompletion:
    """A wrong answer, and the concurrent and recent requests."""

    wrong: WrongAnswer
    request: RequestHistory
    said: Sequence[int]
    others: list[RequestHistory]


class ServerSoak:
    def __init__(self, asker: CompletionClient, seed: int, concurrency: int) -> None:
        self.figures = ServerStatistics()
        self._asker, self._workload, self._concurrency = asker, RequestWorkload(asker.canary, seed), concurrency
        self._running: dict[int, CompletionRequest] = {}
        self._beside: dict[int, set[str]] = {}  # per running request, the kinds of those that were in flight with it
        self._recent: deque[RequestHistory] = deque(maxlen=MAX_OTHERS)
        self._wrong_completions = list[WrongCompletion]()
        self._unconnected = 0  # consecutive failures to connect

    async def run(self, seconds: float) -> None:
        """Run for `seconds`, or until the server is gone."""
        self._began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(self._work() for _ in range(self._concurrency)))
        except TimeoutError:
            pass
        finally:
            self.figures.seconds = self._now()

    def explain(self) -> None:
        """Diagnose some wrong answers: which request their tokens belong to. Takes seconds."""
        self.figures.wrong = [puzzle.wrong for puzzle in self._wrong_completions]
        for puzzle in self._wrong_completions:
            puzzle.wrong.finding = explain_tokens(self._asker.canary, puzzle.request, puzzle.said, puzzle.others)

    async def _work(self) -> None:
        while not self.figures.gone:
            request, began = self._workload.draw(), time.monotonic()
            self._start(request)
            try:
                await self._serve(request)
                self._unconnected = 0
            except NotOffered:  # raised only for several answers
                self._workload.several = False
            except ServerError as error:
                self._count_failure(error)
                await asyncio.sleep(PAUSE_AFTER_FAILURE)
            except asyncio.CancelledError:
                self.figures.open.append(time.monotonic() - began)
                raise
            finally:
                del self._running[request.number], self._beside[request.number]

    def _start(self, request: CompletionRequest) -> None:
        self._beside[request.number] = {each.label for each in self._running.values()}
        for kinds in (self._beside[number] for number in self._running):
            kinds.add(request.label)
        self._running[request.number] = request

    async def _serve(self, request: CompletionRequest) -> None:
        """Raises ServerError and NotOffered."""
        if request.kind == "cut off":
            heard = await self._asker.cancel_midway(request.prompt, request.count)
            self._check_answer(request, heard, Completion())
            self._end_request(request, heard)
            return
        if request.kind == "several":
            answer = await self._asker.generate_several(request.prompt, request.n, request.count)
        else:
            answer = await self._asker.complete(request.prompt, request.count, request.stream)
        said = [self._asker.tokens(answer, choice, request.count) for choice in range(request.n)]
        self._add_latency(answer)
        for each in said:
            self._check_answer(request, each, answer)
        self._end_request(request, said[0])

    def _check_answer(self, request: CompletionRequest, said: list[int], answer: Completion) -> None:
        """Compare each token with the right one."""
        right, oracle = self._workload.expected_tokens(request, said)
        wrong = [at for at, want in enumerate(right) if want not in (None, said[at])]
        figures, moment = self.figures, self.figures.timeline.at(self._now())
        uncertain = right.count(None)
        figures.tokens_checked += len(said) - uncertain
        figures.uncertain += uncertain
        moment.tokens += len(said) - uncertain
        beside = self._beside[request.number] | {request.label}
        if not wrong:
            figures.right_requests += 1
            figures.beside_right.update(beside)
            self._workload.add_answer(request, said, oracle)
            return
        figures.beside_wrong.update(beside)
        figures.wrong_tokens += len(wrong)
        moment.wrong += len(wrong)
        figures.wrong_requests += 1
        if len(self._wrong_completions) == MAX_EXPLAINED and len(wrong) > min(
            each.wrong.tokens for each in self._wrong_completions
        ):
            self._wrong_completions.remove(
                min(self._wrong_completions, key=lambda each: each.wrong.tokens)
            )  # more wrong tokens are more informative
        if len(self._wrong_completions) < MAX_EXPLAINED:
            self._wrong_completions.append(self._record_wrong(request, said, answer, wrong, right))

    def _record_wrong(
        self, request: CompletionRequest, said: list[int], answer: Completion, wrong: list[int], right: list[int | None]
    ) -> WrongCompletion:
        shown = slice(wrong[0], wrong[0] + MAX_SHOWN)
        name, prompt = str(request.number), len(request.prompt)
        found = WrongAnswer(name, request.kind, prompt, len(wrong), wrong[0], right[shown], said[shown])
        found.beside = sorted(each.label for number, each in self._running.items() if number != request.number)
        events = ((answer.cached, f"a prefix hit of {answer.cached} tokens"),) if answer.cached else ()
        others = [_history_of(each) for number, each in self._running.items() if number != request.number]
        return WrongCompletion(found, replace(_history_of(request), events=events), said, [*others, *self._recent])

    def _add_latency(self, answer: Completion) -> None:
        self.figures.total.add(answer.total)
        if answer.first is not None:
            self.figures.first.add(answer.first)
            self.figures.timeline.at(self._now()).first.add(answer.first)
        if answer.cached is not None and answer.prompt_tokens is not None:
            self.figures.cached_tokens = (self.figures.cached_tokens or 0) + answer.cached
            self.figures.prompt_tokens += answer.prompt_tokens

    def _end_request(self, request: CompletionRequest, said: Sequence[int]) -> None:
        self.figures.requests[request.kind] += 1
        self._recent.append(RequestHistory(f"request {request.number}", [*request.prompt, *said], ended=True))

    def _count_failure(self, error: ServerError) -> None:
        if error.no_room:
            self.figures.refused += 1
            return
        self.figures.failed[error.kind] += 1
        self.figures.examples.setdefault(error.kind, str(error))
        self.figures.timeline.at(self._now()).failed += 1
        self._unconnected = self._unconnected + 1 if error.kind == "no connection" else 0
        self.figures.gone = self._unconnected >= FAILURES_UNTIL_GONE * self._concurrency

    def _now(self) -> float:
        """Seconds since the beginning."""
        self.figures.seconds = time.monotonic() - self._began
        return self.figures.seconds


def _history_of(request: CompletionRequest) -> RequestHistory:
    return RequestHistory(f"request {request.number}", request.prompt)
