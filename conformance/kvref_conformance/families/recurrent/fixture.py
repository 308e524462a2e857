"""A recurrent cache in a check: sequences of tokens that the check chooses, and looks at their states."""

from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.recurrent.recurrence import Tokens, make_tokens
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_same
from kvref_conformance.testlib.session import Session

STATE = ("length", "read_inputs", "read_matrix")


class RecurrentFixture(Session):
    """A session, all calls of which the model judges."""

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **changes)
        self.config = self.cache.config
        self.layers = range(self.config["num_layers"])

    def need(self, **sizes: int) -> None:
        """Raises NotOffered if the limits left less of a size than the check needs."""
        for name, size in sizes.items():
            if self.config[name] < size:
                raise NotOffered(f"{name} {size}, where its limits leave {self.config[name]}")

    def tokens(self, *shape: int, kind: str = "whole") -> Tokens:
        """Tokens [num_layers, *shape, num_heads, ...]."""
        return make_tokens(self.subject.rng, self.config, len(self.layers), *shape, kind=kind, dtype=self.subject.dtype)

    def append(self, sequence: int, count: int, kind: str = "whole") -> Tokens:
        """Appends new tokens and returns them."""
        tokens = self.tokens(self.subject.size("tokens", count), kind=kind)
        self.cache.append(sequence, **tokens)
        return tokens

    def filled(self, count: int, kind: str = "whole") -> int:
        """Creates a sequence of `count` tokens."""
        sequence: int = self.cache.create()
        if count:
            self.append(sequence, count, kind)
        return sequence

    def look_at_states(self) -> None:
        self.look(*STATE)

    def state(self, sequence: int) -> list[NDArray]:
        """Reads the whole state of a sequence."""
        return [each(sequence, layer) for layer in self.layers for each in (self.cache.read_inputs, self.cache.read_matrix)]

    def check_same(self, sequence: int, state: list[NDArray], when: str) -> None:
        """Raises ClauseViolation unless the state of a sequence is `state`, to the bit."""
        for number, (got, want) in enumerate(zip(self.state(sequence), state, strict=True)):
            assert_same(got, want, f"{('inputs', 'matrices')[number % 2]} of layer {number // 2} {when}")


def part_of(tokens: Tokens, start: int, stop: int) -> Tokens:
    """The tokens [start, stop)."""
    return {name: each[:, start:stop] for name, each in tokens.items()}
