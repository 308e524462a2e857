"""Bugs in the pooled cache."""

import kvref
from bugs.plant import bug, in_source
from kvref import errors
from kvref.pooled import PooledCache


@bug("POOL-01")
def a_block_grows_to_its_size_class(patch):
    in_source(patch, "kvref.pooled.PooledCache._plan", "size, held = self.config.tokens_per_block", "size, held = 1024 // 40")
    in_source(patch, "kvref.pooled.PooledCache._open", "config.tokens_per_block", "1024 // 40")


@bug("POOL-02")
def an_append_opens_a_block_of_its_own(patch):
    in_source(patch, "kvref.pooled.PooledCache.append", "([self._blocks[-1]] if self._blocks else [])", "[]")


@bug("POOL-03")
def a_block_too_many_goes(patch):
    in_source(
        patch,
        "kvref.pooled.PooledCache._plan",
        "(total - self.config.max_tokens) // size",
        "(total - self.config.max_tokens + 1) // size",
    )


@bug("POOL-04")
def a_failed_append_leaves_an_empty_block(patch):
    append = PooledCache.append

    def leaving(self, keys, values):
        try:
            append(self, keys, values)
        except errors.BufferTooLarge:
            self._blocks = [kvref.PooledBlock(self.pool, 2, 5, 1)]
            raise

    patch.setattr(PooledCache, "append", leaving)


@bug("POOL-05")
def clear_forgets_the_buffers(patch):
    patch.setattr(PooledCache, "clear", lambda self: setattr(self, "_blocks", []))


@bug("POOL-06")
def bytes_are_counted_by_token(patch):
    in_source(patch, "kvref.pooled.PooledBlock.bytes", "self._keys.size + self._values.size", "8 * self._keys.length")
