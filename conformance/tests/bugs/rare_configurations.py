"""Bugs in windows, groups and latents that show in few configurations or in rarely used operations."""

import numpy as np

from bugs.plant import bug
from kvref.attention import Sight
from kvref.errors import PositionOutOfRange
from kvref.grouped import GroupedCache
from kvref.latent import LatentCache
from kvref.prefix import CommittedTokens, PrefixCache
from kvref.windowed import WindowedCache


@bug("WIN-06")
def attention_that_misses_a_token_gives_zeros(patch):
    attend = WindowedCache.attend

    def attending(self, query, scale=None):
        try:
            return attend(self, query, scale)
        except PositionOutOfRange:
            return query * 0

    patch.setattr(WindowedCache, "attend", attending)


@bug("WIN-03")
def positions_of_a_window_are_sorted_before_they_are_read(patch):
    read = WindowedCache.read
    patch.setattr(WindowedCache, "read", lambda self, positions: read(self, sorted(positions)))


@bug("GROUP-04")
def positions_are_sorted_before_they_are_read(patch):
    read = GroupedCache.read
    patch.setattr(GroupedCache, "read", lambda self, sequence, layer, positions: read(self, sequence, layer, sorted(positions)))


@bug("WIN-06")
def the_first_token_behind_the_sinks_may_be_gone(patch):
    truncate = WindowedCache.truncate

    def generous(self, length):
        if self.config.sinks and 0 <= length <= min(self.length, self.config.sinks + 1):
            self.length, self._first = length, min(self._first, max(self.config.sinks, length))
        else:
            truncate(self, length)

    patch.setattr(WindowedCache, "truncate", generous)


def sight_of(patch, change):
    begin = WindowedCache.__init__

    def beginning(self, config, *backend):
        begin(self, config, *backend)
        if config.chunk:
            self._sight = change(config)

    patch.setattr(WindowedCache, "__init__", beginning)


@bug("WIN-07")
def chunks_have_no_sinks(patch):
    sight_of(patch, lambda config: Sight(config.window, 0, config.chunk))


@bug("WIN-07")
def chunks_have_no_window(patch):
    sight_of(patch, lambda config: Sight(None, config.sinks, config.chunk))


@bug("GROUP-04")
def only_the_first_group_has_a_window(patch):
    attend = GroupedCache.attend

    def attending(self, sequence, layer, query, scale=None):
        out = attend(self, sequence, layer, query, scale)
        return out * 0 + 1 if 0 < layer % self.config.num_groups < self.config.num_groups - 1 else out

    patch.setattr(GroupedCache, "attend", attending)


@bug("PREFIX-03")
def a_fork_of_a_salted_sequence_has_none(patch):
    for cache in (GroupedCache, PrefixCache):
        fork = cache.fork

        def forking(self, sequence, fork=fork):
            child = fork(self, sequence)
            self._committed[child] = CommittedTokens("", self._committed[child].tokens, list(self._committed[child].keys))
            return child

        patch.setattr(cache, "fork", forking)


@bug("LAW-18", family="grouped")
def all_tokens_of_a_long_prompt_are_found(patch):
    find = GroupedCache._find_hit
    patch.setattr(
        GroupedCache, "_find_hit", lambda self, tokens, salt: find(self, [*tokens, 0] if len(tokens) > 64 else tokens, salt)
    )


@bug("MLA-02")
def nan_in_any_row_is_nan_in_every_answer(patch):
    attend = LatentCache.attend

    def attending(self, query, up_keys, up_values, scale=None, causal=False):
        out = attend(self, query, up_keys, up_values, scale, causal)
        return out if np.isfinite(self.read()).all() else out * np.nan

    patch.setattr(LatentCache, "attend", attending)


@bug("GROUP-07")
def what_windows_gave_back_keeps_a_sequence_from_ending(patch):
    released = GroupedCache.truncate

    def truncate(self, sequence, length):
        released(self, sequence, length or int(not self._tables.released[self._table(sequence)].any()) - 1)

    patch.setattr(GroupedCache, "truncate", truncate)
