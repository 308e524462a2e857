"""Wrong latent caches."""

from typing import Any

import numpy as np

import kvref
from kvref.formats import get_format
from kvref_zoo.mutant import mutant


@mutant("MLA-02", seen_in="vllm-project/vllm#26042")
class LatentChunksStartAtPositionZero(kvref.LatentCache):
    """Causal queries are placed at the first positions instead of the last.

    This is right for a whole prompt, wrong for its second chunk.
    """

    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: Any = None, causal: bool = False) -> Any:
        held = self.length
        self._length = min(held, len(query)) if causal else held
        try:
            return super().attend(query, up_keys, up_values, scale, causal)
        finally:
            self._length = held


@mutant("MLA-03", also="MLA-06", seen_in="ggml-org/llama.cpp#19067")
class LatentCountsEachRowTwice(kvref.LatentCache):
    """Each row is stored twice, as a key and as a value."""

    @property
    def num_bytes(self) -> int:
        return 2 * super().num_bytes


@mutant("MLA-04", also="EDIT-01 EDIT-03 LAW-04 MLA-01 MLA-02 MLA-05")
class LatentFirstScaleForAll(kvref.LatentCache):
    """A packed row has several scales, and all of its numbers are read with the first."""

    def read(self) -> Any:
        rows = super().read()
        if self.config.dtype == "packed" and self.length:
            scale = np.asarray(self._stores[0].stored(range(self.length)).scale).repeat(128, axis=1)
            rows[:, : self.config.rank] *= scale[:, :1] / scale
        return rows


@mutant("MLA-01", also="MLA-02 MLA-06")
class LatentLeavesOutTheRopePart(kvref.LatentCache):
    """Scores are computed from the latent alone, without the rope part of query and row."""

    def attend(self, query: Any, *others: Any, **options: Any) -> Any:
        alone = np.array(query)
        if alone.ndim == 3:
            alone[..., -self.config.rope_dim :] = 0
        return super().attend(alone, *others, **options)


FP8 = get_format("float8_e4m3fn")


@mutant("MLA-04", also="EDIT-01 EDIT-03 LAW-04 MLA-01 MLA-05")
class LatentPacksTheRopePartToo(kvref.LatentCache):
    """The rope part of a packed row is quantized to FP8, with a scale of its own, before it is stored as bfloat16."""

    def append(self, latent: Any, rope: Any) -> None:
        shape = np.shape(rope)
        whole = self.config.dtype == "packed" and rope.dtype == np.float32 and len(shape) == 2 and np.isfinite(rope).all()
        super().append(latent, FP8.dequantize(FP8.quantize(rope), shape[1]) if whole else rope)


@mutant("MLA-04", also="EDIT-01 EDIT-03 LAW-04 MLA-01 MLA-02 MLA-05", seen_in="vllm-project/vllm#54563")
class LatentScalesArePowersOfTwo(kvref.LatentCache):
    """Scales are written as float32 and read by their exponents alone.

    Values are too small unless the scale is a power of two.
    """

    def read(self) -> Any:
        rows = super().read()
        if self.config.dtype == "packed" and self.length:
            scale = np.asarray(self._stores[0].stored(range(self.length)).scale)
            rows[:, : self.config.rank] *= (np.exp2(np.floor(np.log2(scale))) / scale).repeat(128, axis=1)
        return rows


@mutant("MLA-02", also="MLA-01 MLA-06")
class LatentScalesByTheRowWidth(kvref.LatentCache):
    """Scores are scaled by the width of a row instead of the width of a head's key: right only if both are equal."""

    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: Any = None, causal: bool = False) -> Any:
        row = self.config.rank + self.config.rope_dim
        return super().attend(query, up_keys, up_values, scale * (query.shape[-1] / row) ** 0.5, causal)


@mutant("MLA-02")
class LatentTransposesSquareMatrices(kvref.LatentCache):
    """`up_keys` is transposed if its matrices are square: the shapes fit, and only the result is wrong."""

    def attend(self, query: Any, up_keys: Any, *others: Any, **options: Any) -> Any:
        square = up_keys.ndim == 3 and up_keys.shape[1] == up_keys.shape[2]
        return super().attend(query, up_keys.mT if square else up_keys, *others, **options)


@mutant("MLA-01", also="LAW-10 MLA-02 MLA-06", seen_in="sgl-project/sglang#38666")
class LatentValueIsTheEndOfTheRow(kvref.LatentCache):
    """The value is made from the last `rank` numbers of a row instead of the first.

    It includes the rope part and lacks part of the latent.
    """

    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: Any = None, causal: bool = False) -> Any:
        rank, rows = self.config.rank, self.read()
        absorbed = np.einsum("qhn,hnr->qhr", query[..., : -self.config.rope_dim], up_keys)
        whole = np.concatenate([absorbed, query[..., -self.config.rope_dim :]], axis=2)
        latents = kvref.attention(whole, rows[:, None, :], rows[:, None, -rank:], scale=scale, causal=causal)
        return np.einsum("qhr,hvr->qhv", latents, up_values)
