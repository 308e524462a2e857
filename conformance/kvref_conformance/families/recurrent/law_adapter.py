"""The law adapter of the recurrent cache: a stream is one sequence, and all its tokens can be read from its state.

Keys are the inputs: the state contains as many inputs as there is room for. Values are rows of the matrix: the key of token t has
a 1 at place t and zeros elsewhere, and every gate is 1. All layers get the same tokens.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np

from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.fixtures import different_size, random_tokens
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    BadCall,
    Counter,
    LawAdapter,
    unknown_ids,
)

ROOM = 40  # tokens of a stream
SHAPE = ("num_heads", "channels", "key_dim", "value_dim")  # more sizes that must match to load a file


class RecurrentLawAdapter(LawAdapter):
    family = "recurrent"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **{"num_inputs": ROOM, "key_dim": ROOM + 1} | changes)
        self.layer = self.config["num_layers"] - 1
        self.sequence = int(self.cache.create())
        self.dropped = False

    def sibling(self) -> "RecurrentLawAdapter":
        self.subject.require_size(sequences=2)
        beside = copy(self)
        beside.sequence, beside.num_appended = int(self.cache.create()), 0
        return beside

    def tokens(self, count: int) -> tuple[NDArray, NDArray]:
        heads, subject = self.config["num_heads"], self.subject
        inputs, values = (random_tokens(subject, count, heads, self.config[width]) for width in ("channels", "value_dim"))
        return inputs, values

    def to_cache_layout(self, tokens: NDArray) -> NDArray:
        return np.stack([tokens] * self.config["num_layers"])

    def append_arrays(self, keys: NDArray | OwnArray, values: NDArray | OwnArray) -> None:
        shape = (values.array if isinstance(values, OwnArray) else values).shape
        count, layers, heads = shape[1] if len(shape) == 4 else 1, self.config["num_layers"], self.config["num_heads"]
        places = (len(self) + np.arange(count)) % self.config["key_dim"]
        one_hot = np.zeros((layers, count, heads, self.config["key_dim"]), np.float32)
        one_hot[:, np.arange(count), :, places] = 1
        self.cache.append(self.sequence, keys, one_hot, values, np.ones((layers, count, heads, 2), np.float32))

    def length(self) -> int:
        return int(self.cache.length(self.sequence))

    def read(self) -> tuple[NDArray, NDArray]:
        return self._tokens_of(*(np.asarray(each) for each in (self._read("read_inputs"), self._read("read_matrix"))))

    def _read(self, name: str) -> Any:
        return getattr(self.cache, name)(self.sequence, self.layer)

    def _tokens_of(self, inputs: Any, matrix: Any) -> tuple[Any, Any]:
        count = len(self)
        return inputs[inputs.shape[0] - count :], np.swapaxes(matrix[:, :count], 0, 1) if count else matrix[:, :0].swapaxes(0, 1)

    def read_unconverted(self) -> Any:
        at = self.sequence, self.layer
        return self.cache.as_is("read_inputs", *at), self.cache.as_is("read_matrix", *at)

    def clear(self) -> None:
        self.cache.drop(self.sequence)
        self.sequence, self.num_appended = int(self.cache.create()), 0

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("num_free_blocks")

    def wrong_shapes(self) -> list[tuple[NDArray, NDArray]]:
        inputs, values = (self.to_cache_layout(part) for part in self.tokens(2))
        longer = [self.to_cache_layout(part) for part in self.tokens(3)]
        bad = [(np.concatenate([inputs, inputs], axis=-1), values), (inputs, np.concatenate([values, values], axis=-1))]
        heads = different_size(self.config["num_heads"])
        few = [np.concatenate([part] * 2, axis=2)[:, :, :heads] for part in (inputs, values)]
        bad += [(few[0], few[1]), (few[0], values), (inputs[:, :, :, :1], values[0]), (inputs[0], values[0])]
        bad += [(inputs, longer[1]), (longer[0], values)] if self.subject.size("tokens", 3) == 3 else []
        layers = np.concatenate([inputs] * 2)[: different_size(self.config["num_layers"])]
        return [*bad, (layers, values), (inputs.reshape(-1), values.reshape(-1)), (inputs[None], values[None])]

    def out_of_range_calls(self) -> list[BadCall]:
        sequence, length, layers = self.sequence, len(self), self.config["num_layers"]
        unknown = unknown_ids(self.subject, sequence)
        calls: list[BadCall] = [
            ("LayerOutOfRange", name, (sequence, layer)) for name in ("read_inputs", "read_matrix") for layer in (-1, layers)
        ]
        calls += [("PositionOutOfRange", "truncate", (sequence, wrong)) for wrong in (-1, length + 1)]
        calls += [
            ("PositionOutOfRange", "commit", (sequence, [1] * (length + 1))),
            ("TokenOutOfRange", "commit", (sequence, [-1])),
        ]
        calls += [("SequenceNotFound", "commit", (wrong, [])) for wrong in unknown]
        names = ("length", "fork", "drop", "checkpoint", "save")
        calls += [("SequenceNotFound", name, (wrong,)) for name in names for wrong in unknown]
        calls += [("SequenceNotFound", "read_matrix", (wrong, 0)) for wrong in unknown]
        return [*calls, ("InUse", "reset", ()), *(("TokenOutOfRange", name, ([1, -1],)) for name in ("begin", "match"))]

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        heads, width = self.config["num_heads"], self.config["key_dim"]
        shapes = ((1, heads, width + 1), (1, different_size(heads), width), (heads, width))
        wrong = [random_tokens(self.subject, 1, 1, int(np.prod(shape))).reshape(shape) for shape in shapes]
        inputs, values = (self.to_cache_layout(part)[:, None] for part in self.tokens(1))
        keys, gates = (np.ones((*inputs.shape[:-1], size), np.float32) for size in (width, 2))
        good = {"inputs": inputs, "keys": keys, "values": values, "gates": gates}
        batches = [good | {name: np.concatenate([each, each], axis=axis)} for name, each in good.items() for axis in (0, 1, -1)]
        return {
            "apply": [(self.sequence, self.layer, query) for query in wrong],
            "append_batch": [([self.sequence], [1], *each.values()) for each in batches],
        }

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        at = self.sequence, self.layer
        query = np.ones((2, self.config["num_heads"], self.config["key_dim"]), np.float32)
        return [("read_inputs", at), ("read_matrix", at), ("apply", (*at, query))]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        inputs, values = (self.to_cache_layout(part) for part in self.tokens(1))
        keys, gates = (np.ones((*inputs.shape[:-1], size), np.float32) for size in (self.config["key_dim"], 2))
        yield from (("truncate", (self.sequence, length)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER))
        yield from (("append", (sequence, inputs, keys, values, gates)) for sequence in NEGATIVE)
        for sequence in (-1, LARGEST_JSON_INTEGER, self.sequence, self.sequence):
            self.dropped |= sequence == self.sequence
            yield "drop", (sequence,)

    def room(self) -> int:
        return int(min(self.config["num_inputs"], self.config["key_dim"]))

    def require_room(self, count: int) -> None:
        if (wanted := self.num_appended + count) > self.room():
            raise NotOffered(f"a state that shows {wanted} tokens, where its limits leave {self.room()}")

    def save_unconverted(self) -> Any:
        return self.cache.as_is("save", self.sequence)

    def load(self, data: Any) -> None:
        self.cache.load(self.sequence, data)

    def loading_stream(self) -> LawAdapter:
        return self.new_cache(**self.config | {"num_blocks": self.config["num_blocks"] + 1, "max_drafts": 1, "interval": 2})

    def incompatible_streams(self) -> Iterator[LawAdapter]:
        yield from super().incompatible_streams()
        for name in SHAPE:
            yield self.new_cache(**self.config | {name: self.config[name] + 1})

    def counters(self, appended: int) -> Iterator[Counter]:
        for name, number in self.offered_attributes("num_free_blocks"):
            yield name, number, self.config["num_blocks"]
        if not self.dropped:
            yield "length", self.cache.length(self.sequence), appended
