"""One sentence on why a canary's tokens are wrong, whatever kind of canary it is."""

from collections.abc import Iterator, Sequence

from kvref.canary import Canary
from kvref.canary.hybrid import LAP, AnyCanary, HybridCanary, HybridOracle
from kvref_canary.diagnosis.case import RequestHistory
from kvref_canary.diagnosis.diagnose import diagnose
from kvref_canary.diagnosis.recurrent import diagnose_state


def explain_tokens(
    canary: AnyCanary, request: RequestHistory, generated: Sequence[int], others: Sequence[RequestHistory]
) -> str:  # fmt: skip
    """Return the likely cause of wrong tokens that were generated after those of the request, or "" if none was found.

    others: concurrent and earlier requests, whose cache entries or states can have been read.
    """
    if isinstance(canary, Canary):
        return str(diagnose(canary, request, generated, list(others)) or "")
    return _explain_state(canary, request, generated, others)


def _explain_state(
    canary: HybridCanary, request: RequestHistory, generated: Sequence[int], others: Sequence[RequestHistory]
) -> str:  # fmt: skip
    """The fault of a state at the length of an event, at the end of the request's tokens, or up to a lap before.

    In a lap all of a state is read, so a fault shows that late.
    """
    tokens = list(request.tokens)
    events = [length for length, _ in request.events if length <= len(tokens)]  # a server can report a wrong one
    for restored_at in dict.fromkeys((*events, *range(len(tokens), max(0, len(tokens) - LAP) - 1, -1))):
        texts = [each.tokens for each in others]
        for drafts, origin in _possible_drafts(canary, tokens[:restored_at], others):
            found = diagnose_state(
                canary.architecture, tokens, generated, restored_at=restored_at, others=texts, drafts=drafts
            )  # fmt: skip
            if not found:
                continue
            named = str(found[0])
            if found[0].kind == "foreign":
                named = named.replace(f"session {found[0].session}", others[found[0].session].name)
            if found[0].kind == "ahead":
                named += f": {origin}"
            return f"{named}, at token {restored_at}"
    return ""


def _possible_drafts(
    canary: HybridCanary, tokens: list[int], others: Sequence[RequestHistory]
) -> Iterator[tuple[Sequence[int], str]]:  # fmt: skip
    """Tokens that can have followed these in another copy or at an earlier time, and where they came from."""
    if not tokens:
        yield (), ""
        return
    longer = [each.tokens for each in others if each.ended and list(each.tokens[: len(tokens)]) == tokens]
    if longer and len(tokens) > LAP:  # not merely the same beginning
        yield max(longer, key=len)[len(tokens) :], "tokens that were removed afterwards"
    oracle = HybridOracle(canary.architecture)
    oracle.extend(tokens[:-1])
    answer = [token for token in oracle.generate(tokens[-1], LAP) if token is not None]
    yield answer, "those of a cancelled answer, or of another copy"
