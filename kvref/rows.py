"""Where token rows live: slots of one format, written by scatter and read by gather.

The paged, quantized and two-tier caches keep their tokens here. Data enters as float32 rows [n, num_kv_heads, head_dim], is
quantized once, and lies as codes, scale and zero, each with the slot as its first axis, until it is gathered and dequantized.
"""

from kvref.array import ITEM_BYTES, Array, Shape
from kvref.backend import Backend, Slots
from kvref.formats import Format, Quantized


class RowStore:
    """`num_slots` token rows [num_kv_heads, head_dim] in one format."""

    def __init__(self, backend: Backend, format: Format, num_slots: int, num_kv_heads: int, head_dim: int) -> None:
        self.format = format
        self.token_shape: Shape = (num_kv_heads, head_dim)
        self._backend = backend
        # A scale for each head keeps the axes apart; a scale for each token spans them both.
        self._row: Shape = self.token_shape if format.granularity != "token" else (num_kv_heads * head_dim,)
        codes = (num_slots, *self._row[:-1], format.code_width(self._row[-1]))
        stored = [backend.zeros(codes, format.code_dtype(backend.xp))]
        stored += [backend.zeros(codes[:-1], "float32") for _ in range(format.scale_arrays)]
        self._stored = Quantized(*stored)

    def write(self, slots: Slots, rows: Array) -> None:
        """Quantize float32 rows [n, num_kv_heads, head_dim] into n slots. Raises before anything is written."""
        xp = self._backend.xp
        new = self._backend.quantize(xp.reshape(rows, (rows.shape[0], *self._row)), self.format)
        self._stored = Quantized(
            *(
                None if store is None else self._backend.scatter(store, slots, part)
                for store, part in zip(self._stored, new, strict=True)
            )
        )

    def read(self, slots: Slots) -> Array:
        """float32 [n, num_kv_heads, head_dim]: what the rows in n slots read back as."""
        picked = Quantized(*(None if store is None else self._backend.gather(store, slots) for store in self._stored))
        rows = self._backend.dequantize(picked, self._row[-1], self.format)
        return self._backend.xp.reshape(rows, (rows.shape[0], *self.token_shape))

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes: its codes, and 4 for each scale and zero."""
        codes = self._stored.codes
        elements = _product(codes.shape[1:])
        scales = self.format.scale_arrays * _product(codes.shape[1:-1])
        return elements * ITEM_BYTES[self.format.code_dtype(self._backend.xp)] + 4 * scales


class TokenStore:
    """Keys and values side by side, each with scales of its own (QUANT-06, FMT-AFF-03)."""

    def __init__(self, backend: Backend, format: Format, num_slots: int, num_kv_heads: int, head_dim: int) -> None:
        self.keys = RowStore(backend, format, num_slots, num_kv_heads, head_dim)
        self.values = RowStore(backend, format, num_slots, num_kv_heads, head_dim)
        self.format = format

    def write(self, slots: Slots, keys: Array, values: Array) -> None:
        self.keys.write(slots, keys)
        self.values.write(slots, values)

    def read(self, slots: Slots) -> tuple[Array, Array]:
        return self.keys.read(slots), self.values.read(slots)

    @property
    def token_bytes(self) -> int:
        return self.keys.token_bytes + self.values.token_bytes


def _product(shape: Shape) -> int:
    product = 1
    for axis in shape:
        product *= axis
    return product
