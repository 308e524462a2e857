"""Which of the registered states (fuzz/state_registry.py) a call trace reached, computed with the oracle's models.

    python -m kvref_conformance.fuzz.state_coverage [NAME]

runs the state machines on NAME (default numpy) and prints in how many call sequences each state was reached, and how many pairs
of operations (fuzz/pair_coverage.py) were met.
"""

import sys
from collections import Counter
from collections.abc import Iterable

from kvref_conformance.calls.messages import Exchange, resolve_references
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.hypothesis_runner import families_with_machine
from kvref_conformance.fuzz.pair_coverage import Pair, all_pairs, pairs_in, why_impossible
from kvref_conformance.fuzz.state_registry import NOTES, STATES, ModelCall, SequenceHistory
from kvref_conformance.implementation_api import Implementation
from kvref_conformance.implementations import load_implementation
from kvref_conformance.oracle.model_runner import ModelRunner
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.options import Effort

for family in families_with_machine():
    all_families()[family].part("state_machine")  # registers its states


Transition = tuple[str, str, str]  # the state that was reached last, the operation, and "ok" or the kind of the error
INITIAL_STATE = "nothing was met"


def reached_states(family: str, call_trace: Iterable[Exchange], models: ModelRunner | None = None) -> set[str]:
    """The states that a call trace reached. All of its replies must be correct. models: new ones, of level exact by default."""
    return states_and_transitions(family, call_trace, models or ModelRunner("exact"))[0]


def states_and_transitions(family: str, call_trace: Iterable[Exchange], models: ModelRunner) -> tuple[set[str], set[Transition]]:
    """The states that a call trace with correct replies reached, and its transitions. models: a new one.

    Quiet calls, which only read observables, are no transitions.
    """
    past, transitions, at = SequenceHistory(), set[Transition](), INITIAL_STATE
    for exchange in call_trace:
        request, reply = exchange.request, exchange.reply
        expected = models.expect(request)
        assert reply is not None
        raised = reply.error.kind if reply.error else ""
        if not exchange.quiet:
            transitions.add((at, request.op, raised or "ok"))
        if request.name == "new":
            past.configs[request.id] = request.args
        else:
            args = {name: resolve_references(value, models.replies) for name, value in request.args.items()}
            call = ModelCall(request.id, request.op, request.on or 0, args, reply.ok, raised, models.models, past)
            for name, watched in STATES[family].items():
                if watched.error_kind == raised and (not watched.ops or request.op in watched.ops) and watched.predicate(call):
                    past.reached.add(name)
                    at = name
            if family in NOTES:
                NOTES[family](call)
        models.judge(exchange, expected)
    return past.reached, transitions


def random_sequences(implementation: Implementation, family: str, seed: int = 0, examples: int = 100) -> list[list[Exchange]]:
    """The call traces of the state machine of a family."""
    judge, conversations = CheckRunner(implementation, Effort(seed, examples=examples)), list[list[Exchange]]()

    def keep(subject: Subject, exchange: Exchange) -> None:
        if exchange is subject.call_trace[0]:
            conversations.append(subject.call_trace)

    judge.watchers.append(keep)
    judge.search(family)
    return conversations


def count_reached_states(family: str, sequences: list[list[Exchange]], implementation: Implementation) -> Counter[str]:
    """In how many call sequences of an implementation each state was reached, 0 included."""
    counted = Counter(name for each in sequences for name in reached_states(family, each, ModelRunner.of(implementation)))
    return Counter({name: counted[name] for name in STATES[family]})


def count_pairs(family: str, sequences: list[list[Exchange]]) -> dict[Pair, Counter[str]]:
    """For each pair that was met, in how many call sequences ("": in total), and in how many in each state of the object."""
    counted: dict[Pair, Counter[str]] = {}
    for sequence in sequences:
        for pair, states in pairs_in(family, sequence).items():
            counted.setdefault(pair, Counter()).update({"", *states})
    return counted


def main() -> None:
    implementation = load_implementation(sys.argv[1] if len(sys.argv) > 1 else "numpy")
    for family in STATES:
        sequences = random_sequences(implementation, family)
        print(f"{family}: of {len(sequences)} sequences")
        for name, count in count_reached_states(family, sequences, implementation).items():
            print(f"{count:5}  {name}")
        pairs = count_pairs(family, sequences)
        possible = sum(not why_impossible(pair) for pair in all_pairs(family))
        print(f"{len(pairs):5}  of {possible} possible pairs of operations with nothing read between")
        for state in sorted({state for states in pairs.values() for state in states} - {""}):
            print(f"{sum(state in states for states in pairs.values()):5}  of them {state}")


if __name__ == "__main__":
    main()
