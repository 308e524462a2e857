"""Latent rows (MLA): attention in float64 with the error bound of float32, and packed records."""

from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import EXP_ERROR, U
from kvref_conformance.oracle.formats import PACKED_FORMAT, PLAIN_FORMATS, packed_records, small_floats
from kvref_conformance.oracle.formats.per_row import ExpectedReads, admissible_too, read_as, store
from kvref_conformance.oracle.token_storage import expected_tokens, token_bytes

TILE = 128  # numbers of a latent that share a scale
TINY = 2.0**-126  # the largest error of a product that underflows


def attention(
    query: NDArray, rows: NDArray, up_keys: NDArray, up_values: NDArray, *, scale: float, causal: bool = False
) -> tuple[NDArray, NDArray]:
    """The output and its error bound, float64 [nq, heads, value_dim], for query [nq, heads, nope + rope], rows [n, rank + rope].

    The bound holds both if the matrices of a head are multiplied with the query and the weighted latents (absorbed), and if they
    are multiplied with each row. Both add up the same products of three numbers. Each product is rounded once per number that is
    added to it: nope + rank + rope + 1 times in a score, 3n + 3 + rank times in an output (`oracle.attention`). Over one token
    the weight is 1, whatever its score.
    """
    query, rows, up_keys, up_values = (np.asarray(each, dtype=np.float64) for each in (query, rows, up_keys, up_values))
    num_queries, (heads, nope, rank) = len(query), up_keys.shape
    out = np.zeros((num_queries, heads, up_values.shape[1]))
    bound = np.zeros_like(out)
    latent, rope, large = rows[:, :rank], rows[:, rank:], np.abs(rows)
    sums = large[:, :rank].sum(axis=1)
    seen = len(rows) - num_queries + 1 + np.arange(num_queries) if causal else np.full(num_queries, len(rows))
    attending = np.flatnonzero(seen > 0)
    if not len(attending):
        return out, bound
    query, seen = query[attending], seen[attending]
    visible = np.arange(len(rows)) < seen[:, None]
    largest = np.array([large[:count, :rank].max(axis=0) for count in seen])  # per number of a latent, over the visible rows
    for head in range(heads):
        a, b = up_keys[head], up_values[head]
        large_b, q, q_rope = np.abs(b), query[:, head, :nope], query[:, head, nope:]
        score = scale * (q @ a @ latent.T + q_rope @ rope.T)
        products = np.concatenate([np.abs(q) @ np.abs(a), np.abs(q_rope)], axis=1) @ large.T
        carried = nope * sums + rank * np.abs(q).sum(axis=1, keepdims=True) + nope + rows.shape[1]
        score_error = abs(scale) * (_gamma(nope + rows.shape[1] + 1) * products + TINY * carried)
        most = np.where(visible, np.abs(score) + score_error, 0.0).max(axis=1)
        log_error = np.where(visible, score_error, 0.0).max(axis=1) + 4 * U * most + EXP_ERROR / (1 - EXP_ERROR)
        weight = np.where(visible, score, -np.inf)
        weight = np.exp(weight - weight.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        doubt = np.where(seen > 1, np.exp(np.minimum(2 * log_error, 500)), 1.0)
        relative = doubt * (1 + _gamma(3 * seen + 3 + rank)) - 1
        # The sum of the magnitudes that are added up in each output, and the largest that one token can contribute.
        made, most_made = (weight @ large[:, :rank]) @ large_b.T, largest @ large_b.T
        tiny = 4 * seen[:, None] * most_made + seen[:, None] * large_b.sum(axis=1) + rank + seen[:, None]
        out[attending, head] = (weight @ latent) @ b.T
        bound[attending, head] = relative[:, None] * made + TINY * tiny
    return out, bound


def _gamma(roundings: Any) -> Any:
    return roundings * U / (1 - roundings * U)


def row_bytes(rank: int, rope_dim: int, dtype: str) -> int:
    """Bytes per row."""
    if dtype == PACKED_FORMAT:
        return rank + 4 * (rank // TILE) + 2 * rope_dim
    return token_bytes(1, rank + rope_dim, dtype)


def expected_row(latent: NDArray, rope: NDArray, dtype: str) -> ExpectedReads:
    """The values of rows [n, rank + rope_dim] after storing and reading."""
    if dtype != PACKED_FORMAT:
        return expected_tokens(np.concatenate([latent, rope], axis=1), dtype)
    tiles = read_as(latent.reshape(-1, TILE), "float8_e4m3fn")
    parts = ExpectedReads(*(part.reshape(latent.shape) for part in tiles)), read_as(rope, "bfloat16")
    return ExpectedReads(*(np.concatenate(each, axis=1) for each in zip(*parts, strict=True)))


def expected_records(latent: NDArray, rope: NDArray, dtype: str = PACKED_FORMAT) -> ExpectedReads:
    """The records of rows, uint8 [n, bytes], with the slack of each byte at level tolerant (255 for bytes of scales)."""
    if dtype != PACKED_FORMAT:
        row = np.concatenate([latent, rope], axis=1)
        if dtype not in PLAIN_FORMATS:
            packed = (
                packed_records.written(row, dtype) if len(row) else np.zeros((0, row_bytes(row.shape[1], 0, dtype)), np.uint8)
            )
            return ExpectedReads(
                packed, np.full(packed.shape, 255.0)
            )  # a byte may contain several codes, so it has no useful slack
        held = row.astype("<f4") if dtype == "float32" else small_floats.encode(row, dtype).astype("<u2")
        plain = held.view(np.uint8).reshape(len(row), row_bytes(latent.shape[1], rope.shape[1], dtype))
        return ExpectedReads(plain, np.zeros(plain.shape))
    tiles = latent.reshape(-1, TILE)
    stored = store(tiles, "float8_e4m3fn")
    scales = stored.scale.astype("<f4").reshape(len(latent), latent.shape[1] // TILE).view(np.uint8)
    rotated = small_floats.encode(rope, "bfloat16").astype("<u2").view(np.uint8)
    codes = stored.codes.astype(np.uint8).reshape(latent.shape)
    near = admissible_too(tiles, "float8_e4m3fn").reshape(latent.shape)
    slack = near, np.full(scales.shape, 255), np.zeros(rotated.shape)
    return ExpectedReads(np.concatenate([codes, scales, rotated], axis=1), np.concatenate(slack, axis=1).astype(np.float64))


def read_records(given: NDArray, rank: int) -> NDArray:
    """The values float32 [n, rank + rope_dim] of packed records."""
    given, end = np.asarray(given, np.uint8), rank + 4 * (rank // TILE)
    scales = given[:, rank:end].copy().view("<f4").repeat(TILE, axis=1)
    rope = small_floats.decoded("bfloat16")[given[:, end:].copy().view("<u2")]
    return np.concatenate([small_floats.decoded("float8_e4m3fn")[given[:, :rank]] * scales, rope], axis=1)
