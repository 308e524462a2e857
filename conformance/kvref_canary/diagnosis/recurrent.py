"""Which fault of a recurrent state explains what a hybrid canary generated.

Each fault replaces parts of the state at one length by parts of another state: zeros, the state of some tokens before, the state
after drafts that were rejected, or that of another session. The oracle (kvref.canary.hybrid) predicts the tokens of each. An
engine feeds its own wrong tokens back, so everything after the first wrong token is compared with the prediction, not with the
right text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvref.canary.hybrid import LAP, HybridOracle
from kvref.errors import ConfigError, in_range

MAX_STALE = 2 * LAP  # tokens


@dataclass(frozen=True)
class StateFault:
    """Parts of the state that were replaced, and by what.

    kind: "zero", "stale" (the state of `tokens` tokens before), "ahead" (the state after `tokens` rejected drafts) or "foreign"
    (the state of session number `session` of the others). parts: of "convolution", "matrix" and "attention".
    """

    kind: str
    parts: tuple[str, ...]
    tokens: int = 0
    session: int = -1

    @property
    def simplicity(self) -> tuple[bool, int, int]:
        """A sort key: the simplest fault is the first."""
        return self.kind == "foreign", len(self.parts), self.tokens

    def __str__(self) -> str:
        count = f"{self.tokens} token{'s' * (self.tokens != 1)}"
        replaced = {
            "zero": "zero, as in a new sequence",
            "stale": f"of {count} before",
            "ahead": f"of {count} too many",
            "foreign": f"of session {self.session}",
        }[self.kind]
        return f"the state of the {' and the '.join(self.parts)} is {replaced}"


def diagnose_state(
    architecture: str, prompt: Sequence[int], generated: Sequence[int], *, restored_at: int | None = None,
    others: Sequence[Sequence[int]] = (), drafts: Sequence[int] = (),
) -> list[StateFault]:  # fmt: skip
    """Return the faults that explain the generated tokens up to the first wrong one and beyond, the best explanation first.

    The list is empty if the tokens are right, or if no fault explains them. Faults that predict more of the tokens are first,
    then those of the session's own states, of fewer parts and of fewer tokens. The oracle can be unsure of a token; a fault has
    to predict the first wrong one.

    restored_at: the length at which the engine took the state from elsewhere, for example that of a checkpoint; by default that
    of the prompt. others: the tokens of other sessions; an engine can have their states with or without the last token. drafts:
    tokens that were appended at that length and rejected. Raises ConfigError if `restored_at` is longer than the prompt.
    """
    at = len(prompt) if restored_at is None else in_range(restored_at, len(prompt) + 1, ConfigError, "restored_at")
    history = [HybridOracle(architecture)]  # by length, up to `at`
    said = list[int | None]()
    for token in prompt[:at]:
        history.append(history[-1].fork())
        said += history[-1].extend([token])
    rest, after = list(prompt[at:]), said[-1] if said else None
    right = _predictions(history[at], rest, after, generated)
    wrong = [number for number, (want, got) in enumerate(zip(right, generated, strict=False)) if want != got]
    found = list[tuple[int, StateFault]]()
    for fault, source in _faults(history, others, drafts) if wrong else ():
        predicted = _predictions(_with_parts(history[at], source, fault.parts), rest, after, generated)
        if predicted == list(generated[: len(predicted)]) and len(predicted) > wrong[0]:
            found.append((len(predicted), fault))
    return [fault for _, fault in sorted(found, key=lambda each: (-each[0], each[1].simplicity))]


def _faults(
    history: list[HybridOracle], others: Sequence[Sequence[int]], drafts: Sequence[int]
) -> Iterator[tuple[StateFault, HybridOracle]]:
    """Each fault, and the oracle whose state replaces parts of the right one."""
    right = history[-1]
    recurrent = ["convolution"] + ["matrix"] * (right.matrix is not None)
    parts = [found for count in range(1, len(recurrent) + 1) for found in combinations(recurrent, count)]
    for each in parts:
        yield StateFault("zero", each), HybridOracle(right.architecture)
        for tokens in range(1, min(MAX_STALE, len(history) - 1) + 1):
            yield StateFault("stale", each, tokens), history[-1 - tokens]
        ahead = right.fork()
        for tokens, draft in enumerate(drafts, 1):
            ahead.extend([draft])
            yield StateFault("ahead", each, tokens), ahead.fork()
    with_attention = [("attention",), (*recurrent, "attention")] if right.attention is not None else []
    for session, tokens_of_other in enumerate(others):
        for end in (len(tokens_of_other), len(tokens_of_other) - 1):
            other = HybridOracle(right.architecture)
            other.extend(tokens_of_other[:end])
            for each in (*parts, *with_attention):
                yield StateFault("foreign", each, session=session), other


def _with_parts(oracle: HybridOracle, source: HybridOracle, parts: tuple[str, ...]) -> HybridOracle:
    """Return a copy of the oracle in which these parts of the state are those of the source."""
    made, source = oracle.fork(), source.fork()
    if "convolution" in parts:
        made.delays = source.delays
        if made.matrix is not None and source.matrix is not None:
            made.matrix.previous = source.matrix.previous
    if "matrix" in parts and made.matrix is not None and source.matrix is not None:
        made.matrix.cells, made.matrix.totals = source.matrix.cells, source.matrix.totals
    if "attention" in parts:
        made.attention = source.attention
    return made


def _predictions(oracle: HybridOracle, rest: list[int], after: int | None, generated: Sequence[int]) -> list[int]:
    """Return the token that follows the prompt and each generated token, up to the first that the oracle does not predict.

    after: the token that follows the prompt before the rest, which the state at that length does not change.
    """
    oracle = oracle.fork()
    said = oracle.extend(rest) or [after]
    expected = [said[-1], *oracle.extend(generated[:-1])]
    return [token for token in expected[: expected.index(None) if None in expected else len(expected)] if token is not None]
