"""Stores of tokens in slots, in one format, which most caches use.

Tokens are float32 [n, num_kv_heads, head_dim] on their way in and out. They are quantized once. A slot contains the codes, scale
and zero of one token, in up to three arrays whose first axis is the slot.
"""

from math import prod

from kvref.array import ITEM_BYTES, Array, Shape
from kvref.backend import Backend, Slots
from kvref.formats import Format, Quantized
from kvref.formats.base import stored_as


class SlotStore:
    """`num_slots` slots for keys, or for values, of shape [num_kv_heads, head_dim], stored in one format."""

    def __init__(self, backend: Backend, format: Format, num_slots: int, num_kv_heads: int, head_dim: int) -> None:
        self.format = format
        self.token_shape: Shape = (num_kv_heads, head_dim)
        self._backend = backend
        # What is quantized: rows of a head, or if a scale is per token, one row of all heads.
        self._rows: Shape = self.token_shape if format.granularity != "token" else (num_kv_heads * head_dim,)
        self._parts = stored_as(format, self._rows, backend.xp)
        self._stored = Quantized(*(backend.zeros((num_slots, *shape), dtype) for shape, dtype in self._parts))

    def quantized(self, tokens: Array) -> Quantized:
        """Return float32 tokens [n, num_kv_heads, head_dim] quantized, to be passed to `put`. Raises NonFinite."""
        rows = self._backend.xp.reshape(tokens, (tokens.shape[0], *self._rows))
        return self._backend.quantize(rows, self.format)

    def put(self, slots: Slots, new: Quantized) -> None:
        """Write the n tokens that `quantized` returned to n slots. Negative slots are skipped (KERN-02)."""
        self._stored = Quantized(
            *(
                None if store is None else self._backend.scatter(store, slots, part)
                for store, part in zip(self._stored, new, strict=True)
            )
        )

    def copy(self, sources: Slots, targets: Slots, block_size: int) -> None:
        """Copy blocks of `block_size` slots, codes and scales bit for bit (KERN-09)."""
        self._stored = Quantized(
            *(None if store is None else self._backend.copy(store, sources, targets, block_size) for store in self._stored)
        )

    def stored(self, slots: Slots) -> Quantized:
        """Return the codes, scales and zeros in n slots, without dequantizing them."""
        return Quantized(*(None if store is None else self._backend.gather(store, slots) for store in self._stored))

    def read(self, slots: Slots) -> Array:
        """Return the tokens in n slots: float32 [n, num_kv_heads, head_dim]."""
        return self.dequantized(self.stored(slots))

    def dequantized(self, stored: Quantized) -> Array:
        """Return what the result of `quantized` or `stored` reads back as: float32 [n, num_kv_heads, head_dim]."""
        rows = self._backend.dequantize(stored, self._rows[-1], self.format)
        return self._backend.xp.reshape(rows, (rows.shape[0], *self.token_shape))

    @property
    def rows(self) -> Shape:
        """The shape of a token as it is quantized: (num_kv_heads, head_dim), or one axis of both if a scale is per token."""
        return self._rows

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the arrays of the store: "codes", and "scale" and "zero" if the format stores them."""
        return Quantized._fields[: len(self._parts)]

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each field, by name."""
        return {name: dtype for name, (_, dtype) in zip(self.fields, self._parts, strict=True)}

    def field(self, name: str, slots: Slots) -> Array:
        """Return one field of n slots, bit for bit. It needs less memory than `stored`, which returns all fields."""
        return self._backend.gather(getattr(self._stored, name), slots)

    def put_field(self, name: str, slots: Slots, new: Array) -> None:
        """Write one field of n slots."""
        self._stored = self._stored._replace(**{name: self._backend.scatter(getattr(self._stored, name), slots, new)})

    @property
    def token_bytes(self) -> int:
        """Bytes per slot: codes, scales and zeros."""
        return sum(ITEM_BYTES[dtype] * prod(shape) for shape, dtype in self._parts)


class TokenStore:
    """A store of keys and a store of values with the same slots. Each has its own scales (QUANT-06, FMT-AFF-03)."""

    def __init__(
        self,
        backend: Backend,
        format: Format,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        value_format: Format | None = None,
    ) -> None:
        """format: of keys. value_format: of values, `format` by default; it differs in a given scale (FMT-STATIC-06)."""
        self.keys = SlotStore(backend, format, num_slots, num_kv_heads, head_dim)
        self.values = SlotStore(backend, value_format or format, num_slots, num_kv_heads, head_dim)
        self.format, self.num_slots = format, num_slots

    def quantized(self, keys: Array, values: Array) -> tuple[Quantized, Quantized]:
        """Return float32 keys and values [n, num_kv_heads, head_dim] quantized, to be passed to `put`. Raises NonFinite."""
        return self.keys.quantized(keys), self.values.quantized(values)

    def put(self, slots: Slots, new: tuple[Quantized, Quantized]) -> None:
        """Write the n tokens that `quantized` returned to n slots. Negative slots are skipped (KERN-02)."""
        self.keys.put(slots, new[0])
        self.values.put(slots, new[1])

    def write(self, slots: Slots, keys: Array, values: Array) -> None:
        """Quantize keys and values [n, num_kv_heads, head_dim] and write them to n slots. NonFinite: nothing is written."""
        self.put(slots, self.quantized(keys, values))  # quantizing can raise: keys and values before either is written

    def copy(self, sources: Slots, targets: Slots, block_size: int = 1) -> None:
        """Copy blocks of `block_size` slots, bit for bit (KERN-09)."""
        self.keys.copy(sources, targets, block_size)
        self.values.copy(sources, targets, block_size)

    def read(self, slots: Slots) -> tuple[Array, Array]:
        """Return the keys and values in n slots: float32 [n, num_kv_heads, head_dim] each."""
        return self.keys.read(slots), self.values.read(slots)

    def dequantized(self, stored: tuple[Quantized, Quantized]) -> tuple[Array, Array]:
        """Return what the result of `quantized` reads back as: float32 [n, num_kv_heads, head_dim] each, as `read` would."""
        return self.keys.dequantized(stored[0]), self.values.dequantized(stored[1])

    @property
    def token_bytes(self) -> int:
        """Bytes per slot: codes, scales and zeros of keys and values."""
        return self.keys.token_bytes + self.values.token_bytes
