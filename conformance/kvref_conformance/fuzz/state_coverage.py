"""Which of the registered states (fuzz/state_registry.py) a call trace reached, computed with the oracle's models.

    python -m kvref_conformance.fuzz.state_coverage [NAME]

runs the state machines on NAME (default numpy) and prints in how many call sequences each state was reached.
"""

import sys
from collections import Counter
from collections.abc import Iterable

from kvref_conformance.calls.messages import Exchange, resolved
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.hypothesis_runner import searched
from kvref_conformance.fuzz.state_registry import NOTES, STATES, ModelCall, SequenceHistory
from kvref_conformance.implementation_api import Implementation, Level
from kvref_conformance.implementations import load
from kvref_conformance.oracle.model_runner import ModelRunner
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.options import Effort

for family in searched():
    all_families()[family].part("state_machine")  # registers its states


Transition = tuple[str, str, str]  # the state that was reached last, the operation, and "ok" or the kind of the error
BEGUN = "nothing was met"


def met(family: str, conversation: Iterable[Exchange], level: Level = "exact") -> set[str]:
    """The states that a call trace reached. All of its replies must be correct."""
    return way_of(family, conversation, ModelRunner(level))[0]


def way_of(family: str, conversation: Iterable[Exchange], witness: ModelRunner) -> tuple[set[str], set[Transition]]:
    """The states that a call trace with correct replies reached, and its transitions. witness: a new one.

    Quiet calls, which only read observables, are no transitions.
    """
    past, transitions, at = SequenceHistory(), set[Transition](), BEGUN
    for exchange in conversation:
        request, reply = exchange.request, exchange.reply
        expected = witness.expect(request)
        assert reply is not None
        raised = reply.error.kind if reply.error else ""
        if not exchange.quiet:
            transitions.add((at, request.op, raised or "ok"))
        if request.name == "new":
            past.made[request.id] = request.args
        else:
            args = {name: resolved(value, witness.replies) for name, value in request.args.items()}
            call = ModelCall(request.id, request.op, request.on or 0, args, reply.ok, raised, witness.models, past)
            for name, watched in STATES[family].items():
                if watched.raising == raised and (not watched.ops or request.op in watched.ops) and watched.holds(call):
                    past.met.add(name)
                    at = name
            if family in NOTES:
                NOTES[family](call)
        witness.judge(exchange, expected)
    return past.met, transitions


def count_met(implementation: Implementation, family: str, seed: int = 0, examples: int = 100) -> tuple[Counter[str], int]:
    """In how many call sequences of the state machine each state was reached (0 included), and the number of sequences."""
    judge, conversations = CheckRunner(implementation, Effort(seed, examples=examples)), list[list[Exchange]]()

    def keep(subject: Subject, exchange: Exchange) -> None:
        if exchange is subject.conversation[0]:
            conversations.append(subject.conversation)

    judge.watchers.append(keep)
    judge.search(family)
    counted = Counter(name for each in conversations for name in met(family, each, implementation.level))
    return Counter({name: counted[name] for name in STATES[family]}), len(conversations)


def main() -> None:
    implementation = load(sys.argv[1] if len(sys.argv) > 1 else "numpy")
    for family in STATES:
        counted, sequences = count_met(implementation, family)
        print(f"{family}: of {sequences} sequences")
        for name, count in counted.items():
            print(f"{count:5}  {name}")


if __name__ == "__main__":
    main()
