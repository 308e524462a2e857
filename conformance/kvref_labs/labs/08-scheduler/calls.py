"""Three requests and a scheduler."""

from collections import deque

import numpy as np

from kvref import PagedCache, PagedConfig
from kvref.errors import OutOfBlocks
from kvref_labs.quiz import ask


class Request:
    """tokens: the prompt and the generated tokens. wanted: the length at which it has finished."""

    def __init__(self, name, prompt, generate):
        self.name, self.tokens, self.wanted, self.sequence = name, [1] * prompt, prompt + generate, None


class Scheduler:
    def __init__(self, cache, budget):
        self.cache, self.budget = cache, budget
        self.waiting, self.running, self.preemptions = deque(), [], 0

    def step(self):
        left, before = self.budget, self.preemptions
        for request in list(self.running):
            if request in self.running:  # it was not preempted in this step
                left -= self.advance(request, left)
        while self.waiting and left > 0 and self.preemptions == before:
            request = self.waiting.popleft()
            request.sequence = self.cache.create()
            self.running.append(request)
            left -= self.advance(request, left)

    def advance(self, request, budget):
        """Compute the next tokens of a request, at most `budget`. Return their number."""
        start = self.cache.length(request.sequence, 0)
        chunk = request.tokens[start : start + budget]
        rows = np.array(chunk, np.float32).reshape(-1, 1, 1)
        while True:
            try:
                self.cache.write(request.sequence, 0, start, rows, rows)
                break
            except OutOfBlocks:
                victim = self.running[-1]
                self.remove(victim)
                self.waiting.appendleft(victim)
                self.preemptions += 1
                if victim is request:
                    return 0
        if start + len(chunk) == len(request.tokens):
            request.tokens.append(1)  # the model generates a token; it is computed in the next step
            if len(request.tokens) == request.wanted:
                self.remove(request)
        return len(chunk)

    def remove(self, request):
        self.running.remove(request)
        self.cache.drop(request.sequence)


cache = PagedCache(PagedConfig(num_blocks=6, block_size=4, num_layers=1, num_kv_heads=1, head_dim=1))
scheduler = Scheduler(cache, budget=8)
scheduler.waiting += [Request("a", prompt=6, generate=8), Request("b", prompt=7, generate=4), Request("c", prompt=8, generate=2)]


def running():
    return [request.name for request in scheduler.running]


def lengths():
    return [cache.length(request.sequence, 0) for request in scheduler.running]


scheduler.step()  # the 1st step
ask(1, running())
ask(2, lengths())

scheduler.step()  # the 2nd: a has one token to compute, b five more; then c is admitted
ask(3, lengths())
ask(4, cache.num_free_blocks)

scheduler.step()  # the 3rd
ask(5, lengths())
ask(6, cache.num_free_blocks)

scheduler.step()  # the 4th: a and b need a third block each
ask(7, running())
ask(8, scheduler.preemptions)

while scheduler.running or scheduler.waiting:
    scheduler.step()
ask(9, cache.num_free_blocks)
