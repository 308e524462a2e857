"""Where tokens live: slots of one format, written by scatter and read by gather.

The paged, quantized and tiered caches keep their tokens here. Data enters as float32 [n, num_kv_heads, head_dim], is quantized
once, and lies as codes, scale and zero, each with the slot as its first axis, until it is gathered and dequantized.
"""

from math import prod

from kvref.array import ITEM_BYTES, Array, Shape
from kvref.backend import Backend, Slots
from kvref.formats import Format, Quantized
from kvref.formats.base import stored_as


class SlotStore:
    """`num_slots` slots for keys, or for values, [num_kv_heads, head_dim] each, in one format."""

    def __init__(self, backend: Backend, format: Format, num_slots: int, num_kv_heads: int, head_dim: int) -> None:
        self.format = format
        self.token_shape: Shape = (num_kv_heads, head_dim)
        self._backend = backend
        # A scale for each head keeps the axes apart; a scale for each token spans them both.
        self._rows: Shape = self.token_shape if format.granularity != "token" else (num_kv_heads * head_dim,)
        self._parts = stored_as(format, self._rows, backend.xp)
        self._stored = Quantized(*(backend.zeros((num_slots, *shape), dtype) for shape, dtype in self._parts))

    def quantized(self, tokens: Array) -> Quantized:
        """Float32 [n, num_kv_heads, head_dim] as the slots hold them. Raises NonFinite."""
        rows = self._backend.xp.reshape(tokens, (tokens.shape[0], *self._rows))
        return self._backend.quantize(rows, self.format)

    def put(self, slots: Slots, new: Quantized) -> None:
        """Scatter what `quantized` gave into n slots."""
        self._stored = Quantized(
            *(
                None if store is None else self._backend.scatter(store, slots, part)
                for store, part in zip(self._stored, new, strict=True)
            )
        )

    def copy(self, sources: Slots, targets: Slots, block_size: int) -> None:
        """Let blocks hold what others do, codes and scales bit for bit (KERN-09)."""
        self._stored = Quantized(
            *(None if store is None else self._backend.copy(store, sources, targets, block_size) for store in self._stored)
        )

    def stored(self, slots: Slots) -> Quantized:
        """What n slots hold: codes and scales as they lie there."""
        return Quantized(*(None if store is None else self._backend.gather(store, slots) for store in self._stored))

    def read(self, slots: Slots) -> Array:
        """float32 [n, num_kv_heads, head_dim]: what n slots read back as."""
        return self.dequantized(self.stored(slots))

    def dequantized(self, stored: Quantized) -> Array:
        """float32 [n, num_kv_heads, head_dim]: what `quantized` or `stored` gave reads as, in slots or not."""
        rows = self._backend.dequantize(stored, self._rows[-1], self.format)
        return self._backend.xp.reshape(rows, (rows.shape[0], *self.token_shape))

    @property
    def rows(self) -> Shape:
        """Of what is quantized: [num_kv_heads, head_dim], or both in one where a scale spans all heads."""
        return self._rows

    @property
    def fields(self) -> tuple[str, ...]:
        """Of codes, scale and zero what a slot holds."""
        return Quantized._fields[: len(self._parts)]

    @property
    def dtypes(self) -> dict[str, str]:
        """Of each field."""
        return {name: dtype for name, (_, dtype) in zip(self.fields, self._parts, strict=True)}

    def field(self, name: str, slots: Slots) -> Array:
        """One of the fields of n slots, bit for bit: `stored`, for what has no room for all of them at a time."""
        return self._backend.gather(getattr(self._stored, name), slots)

    def put_field(self, name: str, slots: Slots, new: Array) -> None:
        """Scatter one of the fields of n slots."""
        self._stored = self._stored._replace(**{name: self._backend.scatter(getattr(self._stored, name), slots, new)})

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes: its codes, scales and zeros."""
        return sum(ITEM_BYTES[dtype] * prod(shape) for shape, dtype in self._parts)


class TokenStore:
    """Keys and values side by side, each with scales of its own (QUANT-06, FMT-AFF-03)."""

    def __init__(
        self,
        backend: Backend,
        format: Format,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        value_format: Format | None = None,
    ) -> None:
        """value_format: where values are not in `format`, as keys are: their scale may be given, and another (FMT-STATIC-06)."""
        self.keys = SlotStore(backend, format, num_slots, num_kv_heads, head_dim)
        self.values = SlotStore(backend, value_format or format, num_slots, num_kv_heads, head_dim)
        self.format, self.num_slots = format, num_slots

    def quantized(self, keys: Array, values: Array) -> tuple[Quantized, Quantized]:
        """Float32 keys and values [n, num_kv_heads, head_dim] as the slots hold them. Raises NonFinite."""
        return self.keys.quantized(keys), self.values.quantized(values)

    def put(self, slots: Slots, new: tuple[Quantized, Quantized]) -> None:
        """Scatter what `quantized` gave into n slots."""
        self.keys.put(slots, new[0])
        self.values.put(slots, new[1])

    def write(self, slots: Slots, keys: Array, values: Array) -> None:
        """Quantize keys and values [n, num_kv_heads, head_dim] into n slots. Raises NonFinite, with nothing written."""
        self.put(slots, self.quantized(keys, values))  # both are quantized before either is put anywhere

    def copy(self, sources: Slots, targets: Slots, block_size: int = 1) -> None:
        """Let blocks of slots hold what others hold now, bit for bit."""
        self.keys.copy(sources, targets, block_size)
        self.values.copy(sources, targets, block_size)

    def read(self, slots: Slots) -> tuple[Array, Array]:
        return self.keys.read(slots), self.values.read(slots)

    def dequantized(self, stored: tuple[Quantized, Quantized]) -> tuple[Array, Array]:
        """What `quantized` gave reads as, float32 [n, num_kv_heads, head_dim] each: the same bits as from the slots later."""
        return self.keys.dequantized(stored[0]), self.values.dequantized(stored[1])

    @property
    def token_bytes(self) -> int:
        return self.keys.token_bytes + self.values.token_bytes
