"""Wrong prefix caches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.formats import FORMATS
from kvref.formats.static_scales import StaticFloat8
from kvref.prefix import CachedBlock, CommittedTokens, IndexedBlockPool
from kvref_zoo.mutant import mutant


class OwnPool(kvref.PrefixCache):
    """A cache whose pool belongs to a class of its own."""

    Pool = IndexedBlockPool

    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        self.pool = self.Pool(config.num_blocks)


@mutant("PREFIX-12", also="ATTN-10", seen_in="tenstorrent/vllm#415")
class PrefixAttendSkipsTheHit(kvref.PrefixCache):
    """`attend` leaves out the tokens of the hit: a request with a hit gets another answer than a request without."""

    def begin(self, tokens: Sequence[int], *label: Any, **named: Any) -> int:
        sequence = super().begin(tokens, *label, **named)
        self.hits = getattr(self, "hits", {}) | {sequence: self.length(sequence, 0)}
        return sequence

    def attend(self, sequence: int, layer: int, query: Any, scale: float | None = None, causal: bool = False) -> Any:
        keys, values = self.gather(sequence, layer)
        since = getattr(self, "hits", {}).get(int(sequence), 0)
        since = since if since < len(keys) else 0
        return kvref.attention(query, keys[since:], values[since:], scale=scale, causal=causal)


@mutant("PREFIX-08", also="PAGED-13 PAGED-16 PREFIX-01 PREFIX-09 SHARE-05")
class PrefixEvictsTheFirstBlockFirst(OwnPool):
    """The first block of a dropped prompt is evicted first: the blocks after it are still cached and cannot be found."""

    class Pool(IndexedBlockPool):
        def _return_blocks(self, blocks: NDArray[np.int32]) -> None:
            super()._return_blocks(blocks[::-1])


@mutant("PREFIX-01", also="PREFIX-03 PREFIX-05 PREFIX-07 PREFIX-08 PREFIX-12 PREFIX-13")
class PrefixFindsEveryToken(kvref.PrefixCache):
    """A prompt whose blocks are all cached is found completely: no token is left to compute the first logits from."""

    def _find_hit(self, prompt: CommittedTokens) -> list[CachedBlock]:
        return super()._find_hit(replace(prompt, tokens=np.append(prompt.tokens, 0)))


@mutant("PREFIX-07", also="LAW-01 PREFIX-05 PREFIX-06 PREFIX-08 PREFIX-09 PREFIX-13 PREFIX-16")
class PrefixFindsEvictedBlocks(OwnPool):
    """A block that was evicted for other tokens is still found by its old tokens."""

    class Pool(IndexedBlockPool):
        def _remove_from_index(self, block: int) -> None:
            """Does nothing: the block stays in the index."""


@mutant("PREFIX-04", also="PAGED-13 PAGED-16")
class PrefixFindsPartialBlocks(kvref.PrefixCache):
    """The last block of a prompt is found before it is full: two sequences write the rest of it."""

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        super().commit(sequence, tokens)
        rest = len(tokens) % self.config.block_size
        if rest:  # pad the block's tokens with zeros and add it to the prefix index
            size, table, told = self.config.block_size, self._table(sequence), self._committed[int(sequence)]
            filled = np.append(told.tokens[: len(tokens)], np.zeros(size - rest, np.int64))
            *_, key = self._keys(replace(told, tokens=filled, keys=[]))
            blocks = self._tables.at(table, np.arange(self.config.num_layers), len(tokens) // size)
            self.pool.add_to_index(CachedBlock(key, blocks))


@mutant("PREFIX-03", also="PREFIX-17 PREFIX-18", seen_in="openvinotoolkit/openvino.genai#3722")
class PrefixFoundByHashAlone(kvref.PrefixCache):
    """Blocks are found by a hash with easy collisions, and tokens are not compared: a prompt gets the blocks of another one."""

    def _keys(self, prompt: CommittedTokens) -> Iterator[bytes]:
        size, known, tokens = self.config.block_size, prompt.keys, prompt.tokens.tolist()
        key = known[-1] if known else prompt.salt.encode()
        for start in range(len(known) * size, len(tokens) - size + 1, size):
            number = hash((int.from_bytes(key, "little"), *tokens[start : start + size]))
            key = number.to_bytes(8, "little", signed=True)
            yield key


@mutant("PREFIX-13")
class PrefixHitCountsAsRoom(OwnPool):
    """Evictable blocks of the hit also count as room for the rest of the prompt: `begin` accepts a prompt that does not fit."""

    class Pool(IndexedBlockPool):
        def num_unreferenced(self, blocks: NDArray[np.int32]) -> int:
            return 0


@mutant("PREFIX-16", seen_in="sgl-project/sglang#24198", formats=tuple(FORMATS))
class PrefixHitWithoutScales(kvref.PrefixCache):
    """Attention over the tokens of a hit uses the codes as values: the scales are not passed for this part."""

    def begin(self, tokens: Any, *label: Any, **named: Any) -> int:
        sequence = super().begin(tokens, *label, **named)
        self._hits = getattr(self, "_hits", {}) | {sequence: self.length(sequence, 0)}
        return sequence

    def gather(self, sequence: int, layer: int) -> Any:
        keys, values = super().gather(sequence, layer)
        found = getattr(self, "_hits", {}).get(sequence, 0)
        for part, format in zip((keys, values), self.config.formats, strict=True):
            if isinstance(format, StaticFloat8):
                part[:found] /= format.scale
        return keys, values


@mutant("PREFIX-03", also="PREFIX-01 PREFIX-04 PREFIX-07 PREFIX-18")
class PrefixParentIsLeftOut(kvref.PrefixCache):
    """A block is identified by its own tokens alone: it is found after any other tokens."""

    def _keys(self, prompt: CommittedTokens) -> Iterator[bytes]:
        size = self.config.block_size
        for start in range(len(prompt.keys) * size, len(prompt.tokens) - size + 1, size):
            yield from super()._keys(replace(prompt, tokens=prompt.tokens[start : start + size], keys=[]))


@mutant("PREFIX-03", also="PREFIX-01 PREFIX-04 PREFIX-07 PREFIX-11 PREFIX-13 PREFIX-17")
class PrefixSaltIsLeftOut(kvref.PrefixCache):
    """Blocks are found whatever their salt is: a tenant reads the keys and values of another."""

    def _keys(self, prompt: CommittedTokens) -> Iterator[bytes]:
        return super()._keys(replace(prompt, salt=""))


@mutant("PREFIX-17", seen_in="ggml-org/llama.cpp#26207")
class PrefixAdapterIsLeftOut(kvref.PrefixCache):
    """Blocks are found whatever their adapter is: a request with another adapter, or with none, reads the keys of the first."""

    def _keys(self, prompt: CommittedTokens) -> Iterator[bytes]:
        return super()._keys(replace(prompt, adapter=""))


@mutant("PREFIX-18", seen_in="LMCache/LMCache#690")
class PrefixMediaAreLeftOut(kvref.PrefixCache):
    """Blocks are found by their tokens alone. All images have the same placeholders: each later image is read as the first."""

    def _keys(self, prompt: CommittedTokens) -> Iterator[bytes]:
        return super()._keys(replace(prompt, media=()))


@mutant("PREFIX-18", seen_in="LMCache/LMCache#4086")
class PrefixSixteenBitsOfAContent(kvref.PrefixCache):
    """Of the hash that identifies an image, its last four hexadecimal digits are kept: two images can have the same."""

    def _keys(self, prompt: CommittedTokens) -> Iterator[bytes]:
        return super()._keys(replace(prompt, media=tuple(item._replace(content=item.content[-4:]) for item in prompt.media)))


@mutant("PREFIX-14", also="EDIT-04 PREFIX-02 PREFIX-09 PREFIX-18 SHARE-05 SHARE-07")
class PrefixWritesToCachedBlocks(kvref.PrefixCache):
    """A sequence overwrites a cached block in place if no other sequence has it.

    Later hits on the old tokens read the new ones.
    """

    _needs_copy = kvref.PagedCache._needs_copy
    _copies_needed = kvref.PagedCache._copies_needed


TOKEN_HITS = {"token_hits": True}


class TokenHits(kvref.PrefixCache):
    """A cache whose hits end inside a block, which `begin` copies."""

    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config, token_hits=True)

    def begin(self, tokens: Sequence[int], *label: Any, **named: Any) -> int:
        self.beginning = True  # `_copy_blocks` copies the source of a hit
        try:
            return super().begin(tokens, *label, **named)
        finally:
            self.beginning = False


@mutant("PREFIX-19", also="PREFIX-01 PREFIX-02 PREFIX-09 PREFIX-14", seen_in="Avarok-Cybersecurity/atlas#1193", limits=TOKEN_HITS)
class PrefixSharesABlockInPart(TokenHits):
    """A block that begins with the last tokens of a hit is listed by the new sequence, which writes its own tokens into it."""

    _needs_copy = kvref.PagedCache._needs_copy
    _copies_needed = kvref.PagedCache._copies_needed

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        if not getattr(self, "beginning", False):
            super()._copy_blocks(sources, targets)
            return
        table = self._table(self._next_sequence - 1)
        for layer, (source, target) in enumerate(zip(sources, targets, strict=True)):
            self._tables.replace(table, layer, self._tables.blocks(table, layer).index(target), source)
        self.pool.share_many(sources)
        self.pool.free_many(targets)


@mutant("PREFIX-19", also="PREFIX-01 PREFIX-03 PREFIX-12 PREFIX-18", seen_in="NVIDIA/TensorRT-LLM#8108", limits=TOKEN_HITS)
class PrefixCopiesNothing(TokenHits):
    """The tokens after the full blocks of a hit count as found, and are never copied: their block contains other tokens."""

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        if not getattr(self, "beginning", False):
            super()._copy_blocks(sources, targets)


@mutant("PREFIX-19", also="LAW-04", seen_in="NVIDIA/TensorRT-LLM#8813", limits=TOKEN_HITS)
class PrefixCopiesTooLate(TokenHits):
    """The copy of a block waits until something is read: another sequence can have overwritten the block by then."""

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        if getattr(self, "beginning", False):
            self.waiting = [*getattr(self, "waiting", []), (sources, targets)]
        else:
            super()._copy_blocks(sources, targets)

    def gather(self, sequence: int, layer: int) -> Any:
        for sources, targets in getattr(self, "waiting", []):
            super()._copy_blocks(sources, targets)
        self.waiting = []
        return super().gather(sequence, layer)


@mutant("PREFIX-19", seen_in="NVIDIA/TensorRT-LLM#12404", limits=TOKEN_HITS)
class PrefixCopyNeedsNoRoom(TokenHits):
    """A block that is found in part counts as found: `begin` accepts a prompt without a block for the copy, and fails halfway."""

    class Pool(IndexedBlockPool):
        found_in_part = 0

        def num_unreferenced(self, blocks: NDArray[np.int32]) -> int:
            return super().num_unreferenced(blocks) - self.found_in_part

    def __init__(self, config: kvref.PagedConfig) -> None:
        super().__init__(config)
        self.pool: PrefixCopyNeedsNoRoom.Pool = self.Pool(config.num_blocks)

    def _find_rest(self, prompt: CommittedTokens, found: list[CachedBlock]) -> tuple[int, CachedBlock | None]:
        count, source = super()._find_rest(prompt, found)
        self.pool.found_in_part = 0 if source is None else len(source.blocks)
        return count, source


@mutant("PREFIX-19", also="PREFIX-01 PREFIX-08", seen_in="mratsim/tattletale#93", limits=TOKEN_HITS)
class PrefixGoesOnAfterAPart(TokenHits):
    """Blocks are added to the tree after the block that is equal in part, and found there: their tokens have another prefix."""

    def _find_rest(self, prompt: CommittedTokens, found: list[CachedBlock]) -> tuple[int, CachedBlock | None]:
        count, self.source = super()._find_rest(prompt, found)
        return count, self.source

    def begin(self, tokens: Sequence[int], *label: Any, **named: Any) -> int:
        sequence = super().begin(tokens, *label, **named)
        if self.source is not None:
            self._committed[sequence].keys.append(self.source.key)
        return sequence
