"""The prefix cache: a paged cache that finds blocks of tokens that were computed before (automatic prefix caching).

A full block is identified by a key: a hash of a salt and an adapter, of all tokens before the block, of its own tokens, and of
the media, such as images, of which these tokens are placeholders. `commit` records which tokens a sequence contains and adds its
full blocks to the prefix index: they are cached. `begin` creates a sequence for a prompt and shares the longest run of cached
blocks at its beginning, so that these tokens are not computed again. A cached block that no table lists is free and still found,
until it is evicted: allocated for other tokens.

With `token_hits`, a hit also contains the first tokens of one more block: `begin` copies this block (PREFIX-19).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvref import serialization
from kvref.array import Array
from kvref.backend import Backend, reference
from kvref.block_pool import BlockPool, Blocks
from kvref.block_sequences import BlockOwner
from kvref.errors import ConfigError, InUse, OutOfBlocks, PositionOutOfRange, TokenMismatch, TokenOutOfRange, in_range, integer
from kvref.paged import PagedCache, PagedConfig

TOKEN_BYTES = 8  # per token in the input of the hash
MOST_TOKEN = 2**63  # tokens are below it

Tokens = Sequence[int] | NDArray[np.int64]
Content = tuple[int, str, int]  # what a position contains: the token, and the content and its part that it stands for (PREFIX-18)
Before = bytes | tuple[str, str]  # what is before a block: the key of the block before it, or, of a first block, salt and adapter


class Media(NamedTuple):
    """Media content in a prompt: positions `[start, stop)` are placeholders of `content`, such as the hash of an image."""

    start: int
    stop: int
    content: str


def block_keys(
    tokens: Tokens, block_size: int, salt: str = "", known: Sequence[bytes] = (), adapter: str = "", media: Sequence[Media] = ()
) -> Iterator[bytes]:
    """Yield the key of each full block of `tokens`, in order: 32 bytes each.

    The key of block i is sha256(key of block i - 1 + the block's tokens as little-endian int64 + its media). The media of a block
    are, for each item of `media` with positions in it, in order: where the item starts and where it ends in the block, relative
    to the block's first position, as little-endian int64, and sha256(its content in UTF-8). An item that started in an earlier
    block has a negative start; its end is at most block_size (PREFIX-18).

    The key before block 0 is sha256(sha256(sha256(salt in UTF-8) + sha256(adapter in UTF-8))). Keys are the same in every process
    and for tokens of any integer type (PREFIX-15). No collision of SHA-256 is known, so that equal keys mean equal tokens
    (PREFIX-03).

    Salt and adapter have hashes of their own, so that no pair equals another (PREFIX-17). The key before block 0 is the only hash
    of 32 bytes. Otherwise a salt could be chosen whose bytes are a key and the tokens of a block, and its blocks would have the
    keys of another salt.

    known: the keys of the first blocks, which are not computed again and not yielded.
    """
    names = _digest(salt) + _digest(adapter)
    key = known[-1] if known else hashlib.sha256(hashlib.sha256(names).digest()).digest()
    first, size = len(known), block_size * TOKEN_BYTES
    numbers = np.asarray(tokens[first * block_size :], "<i8").tobytes()
    for block in range(len(numbers) // size):
        position = (first + block) * block_size
        content = numbers[block * size : (block + 1) * size] + _media_bytes(media, position, position + block_size)
        key = hashlib.sha256(key + content).digest()
        yield key


def _digest(text: str) -> bytes:
    """sha256 of a text in UTF-8. A lone surrogate, which UTF-8 excludes but a string can contain, is encoded in 3 bytes too."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _media_bytes(media: Sequence[Media], start: int, stop: int) -> bytes:
    """What the key of a block contains about the media at its positions `[start, stop)`."""
    return b"".join(
        np.array([item.start - start, min(item.stop, stop) - start], "<i8").tobytes() + _digest(item.content)
        for item in media
        if item.start < stop and item.stop > start
    )


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """An entry of the prefix index: the key of block_size tokens, and the blocks that contain them.

    blocks: int32 [num_layers], one block per layer. The same key can have several entries with different blocks, because
    sequences can compute equal tokens independently. before, contents: what is before the block and what it contains, if a part
    of the block can be found (PREFIX-19).
    """

    key: bytes
    blocks: NDArray[np.int32]
    before: Before = b""
    contents: tuple[Content, ...] = ()


class IndexedBlockPool(BlockPool):
    """A block pool with the prefix index, which finds blocks by the key of their tokens.

    A block is cached if it is part of an entry (CachedBlock) of the index. Every block is in one of four states:

    - plain free: no reference, not cached;
    - allocated: one or more references, not cached;
    - allocated and cached: one or more references; it is never overwritten in place;
    - evictable: no reference, cached. It is free and still found, until it is allocated for other tokens.

    Plain free blocks are allocated first, then evictable ones, of which the block that was released longest ago is evicted first
    (PREFIX-08). An OrderedDict of evictable blocks adds, removes and pops the first in O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of `num_blocks` free blocks with an empty index. Raises ConfigError."""
        super().__init__(num_blocks)
        self._evictable: OrderedDict[int, None] = OrderedDict()  # evictable blocks, the one released longest ago first
        # The index: the entries of each key, by the bytes of their blocks, in the order of their commits.
        self._index: dict[bytes, OrderedDict[bytes, CachedBlock]] = {}
        self._entries_of_block: dict[int, dict[CachedBlock, None]] = {}  # the entries that a block is part of
        self._entries_after: dict[Before, dict[CachedBlock, None]] = {}  # the entries of which a part can be found

    @property
    def num_free(self) -> int:
        """The number of free blocks, evictable ones included (PREFIX-06)."""
        return super().num_free + len(self._evictable)

    def find(self, key: bytes) -> CachedBlock | None:
        """Return the entry with this key that was committed first, or None."""
        entries = self._index.get(key)
        return next(iter(entries.values())) if entries else None

    def find_start(self, before: Before, wanted: Sequence[Content]) -> tuple[int, CachedBlock | None]:
        """Return the number of wanted contents that an entry after `before` begins with, at most, and the entry, or 0 and None.

        It is the child of a node in a radix tree that has the longest common prefix with the rest of a prompt (PREFIX-19).
        """
        starts = ((count_common(entry.contents, wanted), entry) for entry in self._entries_after.get(before, ()))
        return max(starts, key=itemgetter(0), default=(0, None))

    def is_cached(self, blocks: Blocks) -> NDArray[np.bool_]:
        """Return which of `blocks` are cached: bool, in the shape of `blocks`."""
        cached = [block in self._entries_of_block for block in np.ravel(blocks).tolist()]
        return np.array(cached, np.bool_).reshape(np.shape(blocks))

    def add_to_index(self, entry: CachedBlock) -> None:
        """Add an entry to the index, unless the same blocks are cached under its key already. The blocks must be allocated."""
        copies = self._index.setdefault(entry.key, OrderedDict())
        if copies.setdefault(entry.blocks.tobytes(), entry) is entry:
            for block in entry.blocks.tolist():
                self._entries_of_block.setdefault(block, {})[entry] = None
            if entry.contents:
                self._entries_after.setdefault(entry.before, {})[entry] = None

    def num_unreferenced(self, blocks: NDArray[np.int32]) -> int:
        """Return how many of `blocks` have no reference: sharing them uses up free blocks."""
        return int((self._references[blocks] == 0).sum())

    def share_many(self, blocks: Blocks) -> None:
        """Add one reference to each of `blocks`, which can be allocated or evictable. Evictable blocks become allocated."""
        for block in np.asarray(blocks).tolist():
            self._evictable.pop(block, None)
        super().share_many(blocks)

    def clear_index(self) -> None:
        """Empty the index: no block is cached afterwards, and evictable blocks are plain free ones (PREFIX-11)."""
        self._index, self._entries_of_block, self._entries_after = {}, {}, {}
        evictable, self._evictable = np.array(list(self._evictable), np.int32), OrderedDict()
        super()._return_blocks(evictable)

    def _pop_free_blocks(self, count: int) -> NDArray[np.int32]:
        """Plain free blocks first, then evictable ones in the order of their release (PREFIX-08)."""
        taken = list[int]()
        while len(taken) < count:
            if plain := min(count - len(taken), super().num_free):
                taken += super()._pop_free_blocks(plain).tolist()
            else:
                oldest, _ = self._evictable.popitem(last=False)
                self._remove_from_index(oldest)
                taken.append(oldest)
        return np.array(taken, np.int32)

    def _return_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Cached blocks without references become evictable, the others plain free."""
        cached = self.is_cached(blocks)
        super()._return_blocks(blocks[~cached])
        self._evictable.update(dict.fromkeys(blocks[cached].tolist()))

    def _remove_from_index(self, block: int) -> None:
        """Remove the entries of an evicted block from the index. Their other blocks are cached no longer either (PREFIX-07)."""
        for entry in self._entries_of_block.pop(block):
            del self._index[entry.key][entry.blocks.tobytes()]
            if not self._index[entry.key]:
                del self._index[entry.key]
            if entry.contents:
                del self._entries_after[entry.before][entry]
                if not self._entries_after[entry.before]:
                    del self._entries_after[entry.before]
            for other in set(entry.blocks.tolist()) - {block}:
                del self._entries_of_block[other][entry]
                if not self._entries_of_block[other]:
                    del self._entries_of_block[other]
                    if other in self._evictable:  # not cached any more: a plain free block
                        del self._evictable[other]
                        super()._return_blocks(np.array([other], np.int32))


@dataclass
class CommittedTokens:
    """Which tokens a sequence is known to contain, from position 0 on, and the keys of its full blocks.

    salt, adapter, media: what the sequence began with. The media can be at positions whose tokens are not committed yet.
    """

    salt: str
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    keys: list[bytes] = field(default_factory=list)
    adapter: str = ""
    media: tuple[Media, ...] = ()

    @property
    def before(self) -> Before:
        """What is before the first block whose key is not known."""
        return self.keys[-1] if self.keys else (self.salt, self.adapter)

    def contents(self, start: int, stop: int) -> list[Content]:
        """What the positions `[start, stop)` contain. Two tokens are equal in the sense of PREFIX-18 (a) if these are equal."""
        found = [(token, "", -1) for token in self.tokens[start:stop].tolist()]
        for item in self.media:
            for position in range(max(item.start, start), min(item.stop, stop)):
                found[position - start] = found[position - start][0], item.content, position - item.start
        return found

    def truncate(self, length: int, block_size: int) -> None:
        """Forget the committed tokens and the media from position `length` on (PREFIX-02, PREFIX-18)."""
        self.tokens = self.tokens[:length]
        del self.keys[length // block_size :]
        self.media = tuple(item._replace(stop=min(item.stop, length)) for item in self.media if item.start < length)

    def add(self, numbers: NDArray[np.int64], written: int) -> None:
        """Record committed tokens, from position 0 on. written: the number of tokens that every layer has.

        Raises PositionOutOfRange if there are more tokens than `written`, TokenMismatch if one differs from a committed token.
        """
        in_range(len(numbers), written + 1, PositionOutOfRange, "len(tokens)")
        common = min(len(numbers), len(self.tokens))
        for at in np.flatnonzero(numbers[:common] != self.tokens[:common]):
            raise TokenMismatch(f"token at position {at}: {numbers[at]} differs from the committed token {self.tokens[at]}")
        self.tokens = numbers if len(numbers) > common else self.tokens


class PrefixIndexed(BlockOwner):
    """Base class of caches with a prefix index. It adds two things to BlockOwner:

    - the committed tokens of each live sequence (`_committed`), which changes of the sequence shorten;
    - copy-on-write of cached blocks: a write to a cached block goes to a copy, so that cached blocks never change (PREFIX-14).
    """

    pool: IndexedBlockPool
    _committed: dict[int, CommittedTokens]

    def reset(self) -> None:
        """Remove all blocks from the prefix index. Raises InUse if a sequence is live (PREFIX-11)."""
        if self._committed:
            raise InUse(f"cannot reset: live sequences: {len(self._committed)}")
        self.pool.clear_index()

    def create(self) -> int:
        """Create an empty sequence without blocks, with the empty salt, and return its id (PAGED-01)."""
        sequence = super().create()
        self._committed[sequence] = CommittedTokens("")
        return sequence

    def drop(self, sequence: int) -> None:
        """Remove a sequence, and one reference to each of its blocks (PAGED-07). Raises SequenceNotFound.

        Its cached blocks stay in the index (PREFIX-06).
        """
        super().drop(sequence)
        del self._committed[int(sequence)]

    def fork(self, sequence: int) -> int:
        """Create a sequence with the same tokens, salt and committed tokens, and return its id. Raises SequenceNotFound.

        The two share all blocks (SHARE-03).
        """
        child = super().fork(sequence)
        committed = self._committed[int(sequence)]
        self._committed[child] = replace(committed, keys=list(committed.keys))
        return child

    def truncate(self, sequence: int, length: int) -> None:
        """Remove all tokens but the first `length` from every layer (EDIT-01). Cached blocks stay in the index (PREFIX-02).

        Raises PositionOutOfRange, NotTruncatable or SequenceNotFound.
        """
        super().truncate(sequence, length)
        self._committed[int(sequence)].truncate(int(length), self._tables.block_size)

    def _needs_copy(self, blocks: NDArray[np.int32]) -> NDArray[np.bool_]:
        return super()._needs_copy(blocks) | self.pool.is_cached(blocks)

    def _copies_needed(self, block: int) -> int:
        return self.pool.references(block) - (not self.pool.is_cached([block])[0])


class PrefixCache(PrefixIndexed, PagedCache):
    """A paged cache with prefix caching (chapter PREFIX): PagedCache with `begin`, `commit`, `match` and `reset`.

    Serving a prompt: `begin(tokens)` creates a sequence that already has the cached tokens at its beginning. The caller computes
    and writes the others, from position `length` on, and then calls `commit(sequence, tokens)`.

    A write to a cached block goes to a copy, also if only one sequence has the block, so that cached blocks never change
    (PREFIX-14).

    token_hits: whether a hit contains single tokens after its full blocks, which `begin` copies from the cached block that begins
    with them (PREFIX-19). Otherwise a hit consists of full blocks.
    """

    def __init__(self, config: PagedConfig, backend: Backend = reference, *, token_hits: bool = False) -> None:
        """Allocate memory for all blocks on the device of `backend`."""
        super().__init__(config, backend)
        self.pool, self._committed, self.token_hits = IndexedBlockPool(config.num_blocks), {}, token_hits

    def match(self, tokens: Sequence[int], salt: str = "", adapter: str = "", media: Sequence[Sequence[Any]] = ()) -> int:
        """Return the hit: how many of the first tokens `begin` would find with these arguments (PREFIX-01).

        It changes nothing (PREFIX-05). The hit is less than the number of tokens, and without `token_hits` a multiple of
        block_size. Raises as `begin` does, except OutOfBlocks.
        """
        prompt = _prompt(tokens, salt, adapter, media)
        found = self._find_hit(prompt)
        return len(found) * self.config.block_size + self._find_rest(prompt, found)[0]

    def begin(self, tokens: Sequence[int], salt: str = "", adapter: str = "", media: Sequence[Sequence[Any]] = ()) -> int:
        """Create a sequence for a prompt, which shares the cached blocks at its beginning, and return its id.

        With `token_hits`, it also has a copy of the block that begins with the next tokens. The length of the sequence is the
        hit, which `match` returns (PREFIX-01). It is less than len(tokens), because the logits of the last token have to be
        computed. Blocks for the other tokens are allocated, and their keys and values are to be written.

        tokens: integers in `[0, 2^63)`. salt: a string for everything else that keys and values depend on, such as a tenant.
        adapter: the name of the adapter that the keys and values are computed with, empty for none (PREFIX-17). media: lists
        `[start, stop, content]` in the order of positions: the tokens at [start, stop) are placeholders of `content` (PREFIX-18).

        Raises TokenOutOfRange, PositionOutOfRange for media, ConfigError unless salt, adapter and contents are strings, or
        OutOfBlocks with nothing changed (PREFIX-13).
        """
        prompt = _prompt(tokens, salt, adapter, media)
        found = self._find_hit(prompt)
        rest, source = self._find_rest(prompt, found)
        entries = np.array([each.blocks for each in found], np.int32).reshape(-1, self.config.num_layers)
        more = self._tables.entries_for(len(prompt.tokens)) - len(found)
        needed = more * self.config.num_layers + self.pool.num_unreferenced(entries)
        if needed > self.pool.num_free:
            raise OutOfBlocks(f"out of blocks: {needed} needed, {self.pool.num_free} free")
        sequence = self.create()
        table, hit = self._table(sequence), len(found) * self.config.block_size + rest
        self.pool.share_many(entries.reshape(-1))
        self._tables.append(table, entries)
        self._tables.lengths[table] = hit
        self.ensure_capacity(sequence, len(prompt.tokens))
        if source is not None:  # `ensure_capacity` can have evicted it. Its tokens stay in the blocks until the next write.
            copies = self._tables.at(table, np.arange(self.config.num_layers), len(found))
            self._copy_blocks(source.blocks.tolist(), copies.tolist())
        self._committed[sequence] = replace(prompt, tokens=prompt.tokens[:hit], keys=[each.key for each in found])
        return sequence

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record that the first positions of a sequence contain `tokens`, and add every full block to the index (PREFIX-02).

        Raises SequenceNotFound, TokenOutOfRange, PositionOutOfRange if there are more tokens than some layer has, and
        TokenMismatch if a token differs from the committed token at its position.
        """
        table, numbers = self._table(sequence), token_numbers(tokens)
        committed = self._committed[int(sequence)]
        committed.add(numbers, int(self._tables.lengths[table].min()))
        keys, first = list(self._keys(committed)), len(committed.keys)
        entries = np.arange(first, first + len(keys))[:, None]
        blocks = self._tables.at(table, np.arange(self.config.num_layers), entries)
        gone = max(0, int(self._tables.released[table].max()) - first)
        for number, (key, held) in enumerate(zip(keys, blocks, strict=True), first):
            if number >= first + gone:
                self.pool.add_to_index(CachedBlock(key, held, *self._place(committed, number)))
            committed.keys.append(key)

    def write(self, sequence: int, layer: int, start: int, keys: Array, values: Array) -> None:
        """As `PagedCache.write`. Overwriting position p also forgets the committed tokens from p on (PREFIX-02)."""
        length = self.length(sequence, layer)
        super().write(sequence, layer, start, keys, values)
        count = len(keys) if isinstance(keys, Sequence) else keys.shape[0]  # lists are accepted too
        if start < length and count:
            self._committed[int(sequence)].truncate(int(start), self.config.block_size)

    def remove(
        self, sequence: int, start: int, stop: int, frequencies: Sequence[float] | None = None, layout: str = "halves"
    ) -> None:
        """As `PagedCache.remove`. It also forgets the committed tokens from `start` on (PREFIX-02)."""
        super().remove(sequence, start, stop, frequencies, layout)
        if start < stop:
            self._committed[int(sequence)].truncate(int(start), self.config.block_size)

    def receive(self, file: BinaryIO, sequence: int) -> None:
        """As `PagedCache.receive`. Afterwards the sequence has no committed tokens."""
        table = self._table(sequence)
        serialization.verify(file)  # before super().receive evicts cached blocks for its room
        super().receive(file, sequence)
        if self._table(sequence) != table:
            self._committed[int(sequence)].truncate(0, self.config.block_size)  # a file does not contain the tokens

    def _keys(self, prompt: CommittedTokens) -> Iterator[bytes]:
        """The keys of full blocks that are not known yet."""
        return block_keys(prompt.tokens, self.config.block_size, prompt.salt, prompt.keys, prompt.adapter, prompt.media)

    def _find_hit(self, prompt: CommittedTokens) -> list[CachedBlock]:
        """The index entries of the hit, in order: up to the first block that is not cached, never all tokens (PREFIX-09)."""
        found = list[CachedBlock]()
        for key in self._keys(replace(prompt, tokens=prompt.tokens[:-1])):
            copy = self.pool.find(key)
            if copy is None:
                break
            found.append(copy)
        return found

    def _find_rest(self, prompt: CommittedTokens, found: list[CachedBlock]) -> tuple[int, CachedBlock | None]:
        """The number of tokens after the found blocks that a cached block begins with, and its entry; 0 and None if none does."""
        start = len(found) * self.config.block_size
        stop = min(start + self.config.block_size, len(prompt.tokens) - 1)
        if not self.token_hits or start >= stop:
            return 0, None
        before = replace(prompt, keys=[each.key for each in found]).before
        count, source = self.pool.find_start(before, prompt.contents(start, stop))
        return (count, source) if count else (0, None)

    def _place(self, committed: CommittedTokens, number: int) -> tuple[Before, tuple[Content, ...]]:
        """What is before a block and what it contains, by which a part of it is found (PREFIX-19). Empty without `token_hits`."""
        start = number * self.config.block_size
        if not self.token_hits:
            return b"", ()
        return committed.before, tuple(committed.contents(start, start + self.config.block_size))


def count_common(first: Sequence[Content], second: Sequence[Content]) -> int:
    """Return the number of leading items that are equal."""
    return next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(len(first), len(second))
    )


def _accept_string(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"{name}: expected a string, got {text!r:.80}")


def _prompt(tokens: Sequence[int], salt: str, adapter: str, media: Sequence[Sequence[Any]]) -> CommittedTokens:
    """A prompt, as if all its tokens were committed. Raises TokenOutOfRange, PositionOutOfRange or ConfigError."""
    numbers, items, end = token_numbers(tokens), list[Media](), 0
    _accept_string("salt", salt)
    _accept_string("adapter", adapter)
    for start, stop, content in media:
        _accept_string("content of media", content)
        item = Media(in_range(start, len(numbers), PositionOutOfRange, "start of media"), integer(stop) or 0, content)
        if not end <= item.start < item.stop <= len(numbers):
            allowed = f"positions in [{end}, {len(numbers)}) after the previous item, of at least one token"
            raise PositionOutOfRange(f"media: expected {allowed}, got [{start}, {stop})")
        items.append(item)
        end = item.stop
    return CommittedTokens(salt, numbers, adapter=adapter, media=tuple(items))


def token_numbers(tokens: Sequence[int]) -> NDArray[np.int64]:
    """Return tokens as int64 [n]. Raises TokenOutOfRange unless each is an integer in `[0, 2^63)`."""
    if set(map(type, tokens)) <= {int}:  # NumPy would convert True to 1
        with suppress(OverflowError):
            numbers = np.array(tokens, np.int64)
            if numbers.min(initial=0) >= 0:
                return numbers
    return np.array([in_range(token, MOST_TOKEN, TokenOutOfRange, "token") for token in tokens], np.int64)
