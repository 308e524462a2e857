"""One call of each operation."""

from kvref.canary import BOS, FIRST_WORD
from kvref_conformance.checking.steps import Got, Sizes, Steps, of, owned

PROMPT = [BOS, *(FIRST_WORD + word for word in range(50))]


def steps(sizes: Sizes) -> Steps:
    def session(got: Got) -> int:
        number: int = got["engine.open"]
        return number

    return {
        **owned("engine", {
            "open": of(), "extend": of(session=session, tokens=PROMPT), "length": of(session=session),
            "generate": of(session=session, count=2), "step": of(sessions=lambda got: [session(got)]),
            "sample": of(session=session, n=2, count=2), "cancel": of(session=session, count=2),
            "fork": of(session=session), "save": of(session=session), "load": of(saved=lambda got: got["engine.save"]),
            "truncate": of(session=session, length=50), "remove": of(session=session, start=1, stop=3),
            "close": of(session=session),
        }),
    }  # fmt: skip
