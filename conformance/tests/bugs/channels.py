"""Bugs in the KIVI cache, which quantizes keys by channel."""

import numpy as np

from bugs.plant import bug, hidden, in_source, real
from kvref.channels import ChannelCache, ChannelConfig

CLASS = "kvref.channels.ChannelCache."
APPEND, ORIGINALS, TRUNCATE = f"{CLASS}append", f"{CLASS}_originals", f"{CLASS}truncate"
BY_CHANNEL = "by_channel = self._keys.quantized(self._by_channel(self._originals(0, *old_keys, new)))"
HELD = "held = self._from_ring(which, start, min(stop, self.length))"


def then(patch, *more):
    """Insert these statements into `append` after the keys are quantized."""
    in_source(patch, APPEND, BY_CHANNEL, "; ".join([BY_CHANNEL, *more]))


def counted(patch, name, count):
    """Replace the number of quantized tokens by `count(config, tokens)`."""
    patch.setattr(ChannelConfig, name, count)


@bug("KIVI-01")
def keys_have_a_scale_a_token(patch):
    def cut(self, tokens):
        return tokens.reshape(-1, self.config.num_kv_heads * self.config.head_dim, self.config.groups.group)

    patch.setattr(ChannelCache, "_by_channel", cut)
    patch.setattr(
        ChannelCache, "_by_token", lambda self, groups: groups.reshape(-1, self.config.num_kv_heads, self.config.head_dim)
    )


@bug("KIVI-01")
def channels_share_the_scale_of_the_first(patch):
    then(patch, "by_channel = by_channel._replace(scale=0 * by_channel.scale + by_channel.scale[:, :1])")


@bug("KIVI-01")
def a_last_head_has_the_zeros_of_the_first(patch):
    zeros = "np.concatenate([by_channel.zero[:, :-1], by_channel.zero[:, :1]], axis=1)"
    then(patch, f"by_channel = by_channel._replace(zero={zeros})")


@bug("KIVI-03", "KIVI-04")
def the_scale_of_the_last_group_is_used_again(patch):
    last = "self._keys.stored([old_keys[0] // config.groups.group - 1]).scale"
    then(patch, f"by_channel = by_channel._replace(scale=0 * by_channel.scale + {last}) if old_keys[0] else by_channel")


@bug("KIVI-02")
def keys_are_quantized_as_soon_as_a_group_is_full(patch):
    counted(patch, "quantized_keys", lambda self, tokens: tokens // self.groups.group * self.groups.group)


@bug("KIVI-02")
def a_residual_is_flushed_one_token_late(patch):
    counted(patch, "quantized_keys", lambda self, tokens: max(0, tokens - 1) // self.residual * self.residual)


@bug("KIVI-02")
def values_leave_the_window_one_token_early(patch):
    counted(patch, "quantized_values", lambda self, tokens: max(0, tokens - self.residual + 1))


@bug("KIVI-02")
def values_are_flushed_with_the_keys(patch):
    counted(patch, "quantized_values", ChannelConfig.quantized_keys)


@bug("KIVI-02")
def the_residual_reads_as_zeros_once_it_was_flushed(patch):
    from_ring = ChannelCache._from_ring

    def forgetful(self, which, start, stop):
        held = np.array(from_ring(self, which, start, stop))
        held[: max(0, self.quantized_keys - start)] = 0  # clears full-precision values as if they were keys
        return held

    patch.setattr(ChannelCache, "_from_ring", forgetful)


@bug("KIVI-03")
def the_history_is_quantized_again_at_each_flush(patch):
    append = ChannelCache.append

    def again(self, keys, values):
        before = self.quantized_keys
        append(self, keys, values)
        if 0 < before < self.quantized_keys:
            groups = range(before // self.config.groups.group)
            self._keys.put(groups, self._keys.quantized(self._keys.read(groups) * np.float32(0.999)))

    patch.setattr(ChannelCache, "append", again)


@bug("KIVI-03")
def values_are_quantized_again_at_each_append(patch):
    append = ChannelCache.append

    def again(self, keys, values):
        append(self, keys, values)
        old = range(self.quantized_values)
        self._values.put(old, self._values.quantized(self._values.read(old) * np.float32(0.999)))

    patch.setattr(ChannelCache, "append", again)


@bug("KIVI-03")
def groups_are_made_of_numbers_in_half_precision(patch):
    in_source(patch, ORIGINALS, "[held, more]", "[held.astype(np.float16).astype(np.float32), more]")


@bug("KIVI-03", "KIVI-04")
def a_prompt_is_quantized_as_it_came(patch):
    whole = "new = (keys, values) if keys.shape[0] > config.residual else new; old_keys ="
    in_source(patch, APPEND, "old_keys = config", f"{whole} config")


@bug("KIVI-04")
def the_range_of_a_group_is_of_what_comes_last(patch):
    in_source(patch, ORIGINALS, HELD, f"{HELD}; held = np.clip(held, np.min(new[which]), np.max(new[which])) if stop > start "
              "else held")  # fmt: skip


@bug("KIVI-04")
def a_prompt_has_one_scale_for_all_of_its_groups(patch):
    widest = "np.argmax(by_channel.scale.astype(np.float64).max(axis=(1, 2)))"
    then(
        patch, f"widest = {widest} if keys.shape[0] > 2 * config.residual else slice(None)",
        "by_channel = by_channel._replace(scale=0 * by_channel.scale + by_channel.scale[widest])",
    )  # fmt: skip


@bug("KIVI-05")
def zeros_are_not_counted(patch):
    in_source(patch, f"{CLASS}memory_bytes", "self._values.token_bytes", "(self._values.token_bytes * 4 // 5)")


@bug("KIVI-05")
def the_residual_is_counted_as_quantized(patch):
    in_source(patch, f"{CLASS}memory_bytes", "(2 * self.length - keys - values)", "0")


@bug("KIVI-06")
def numbers_are_looked_at_as_they_came(patch):
    in_source(patch, APPEND, 'zip(("keys", "values"), new, ', 'zip(("keys", "values"), (keys, values), ')


@bug("KIVI-06")
def numbers_are_looked_at_when_a_group_is_full(patch):
    in_source(patch, APPEND, "self._check_storable(name, part)", "pass")


@bug("KIVI-06")
def keys_alone_are_looked_at(patch):
    in_source(patch, APPEND, "self._check_storable(name, part)", "name == 'keys' and self._check_storable(name, part)")


@bug("KIVI-07", "LAW-01")
def tokens_come_as_far_as_they_fit(patch):
    append = ChannelCache.append

    def one_by_one(self, keys, values):
        append(self, keys[:0], values[:0])
        for at in range(len(keys)):
            append(self, keys[at : at + 1], values[at : at + 1])

    patch.setattr(ChannelCache, "append", one_by_one)


@bug("KIVI-07")
def a_full_cache_is_one_token_short(patch):
    in_source(patch, APPEND, "stop > config.max_tokens", "stop >= config.max_tokens")


@bug("KIVI-08")
def truncating_goes_anywhere(patch):
    in_source(patch, TRUNCATE, "if length and full < self._first", "if False")


@bug("KIVI-08")
def no_drafts_are_held(patch):
    in_source(patch, f"{CLASS}__init__", "config.residual + config.rollback", "config.residual")


@bug("KIVI-08")
def nothing_goes_back_once_a_residual_is_full(patch):
    in_source(patch, TRUNCATE, "if length and full", "if full")


@bug("KIVI-08")
def a_truncate_keeps_a_stale_scale(patch):
    """A group that was quantized once counts as still quantized: new codes are written, and its scale stays."""
    truncate = ChannelCache.truncate

    def remembering(self, length):
        frontier = max(getattr(self, "frontier", 0), self.quantized_keys)
        truncate(self, length)
        self.frontier = frontier

    patch.setattr(ChannelCache, "truncate", remembering)
    groups = "range(old_keys[0] // config.groups.group, old_keys[1] // config.groups.group)"
    stale = "old_keys[1] > old_keys[0] and old_keys[1] <= getattr(self, 'frontier', 0)"
    then(patch, f"by_channel = by_channel._replace(scale=self._keys.stored({groups}).scale) if {stale} else by_channel")


@bug("KIVI-09")
def a_residual_may_end_in_a_group(patch):
    in_source(patch, "kvref.channels.ChannelConfig.__post_init__", "self.residual % self.groups.group", "False")


@bug("EDIT-01", "EDIT-03")
def truncating_to_some_leaves_one_more(patch):
    more = "min(self.length, length + (length > 0))"
    in_source(patch, TRUNCATE, "self.length, self._first = length,", f"self.length, self._first = {more},")


@bug("EDIT-02")
def truncating_to_more_makes_it_longer(patch):
    in_source(patch, TRUNCATE, 'in_range(length, self.length + 1, PositionOutOfRange, "length")', "abs(length)")


@bug("ATTN-10")
def attention_is_over_what_is_quantized(patch):
    def attend(self, query, scale=None, causal=False):
        count = self.quantized_keys or self.length
        from kvref.attention import attention

        return attention(query, *self._read(0, count), scale=scale, causal=causal, backend=self._backend)

    patch.setattr(ChannelCache, "attend", attend)


@hidden("channels", "KIVI-08")
def after_a_clear_no_token_goes_back(patch):
    in_source(patch, TRUNCATE, "min(self._first, length)", "self._first")


@hidden("channels", "KIVI-01")
def a_residual_that_one_token_fills_has_lost_its_first(patch):
    in_source(patch, ORIGINALS, "[held, more]", "[held[:1] * (len(more) != 1 or which), held[1:], more]")


@hidden("channels", "KIVI-08")
def a_group_that_is_filled_again_has_lost_its_first(patch):
    in_source(
        patch, TRUNCATE, "self.length, self._first =", "self._back = getattr(self, '_back', 0) or length < self.quantized_keys\n"
        "    self.length, self._first =",
    )  # fmt: skip
    in_source(patch, ORIGINALS, "[held, more]", "[held[:1] * (which or not getattr(self, '_back', 0)), held[1:], more]")


@real("channels")
def values_wrap_at_2048(patch):
    in_source(patch, APPEND, "self._values.put(range(*old_values), by_token)",
              "self._values.put([slot % 2048 for slot in range(*old_values)], by_token)")  # fmt: skip


@real("channels")
def a_seventieth_group_of_tokens_has_the_scale_of_the_first(patch):
    there = "old_keys[1] > 70 * config.groups.group >= old_keys[0] > 0"
    first = "np.where((np.arange(len(by_channel.scale)) == 70 - old_keys[0] // config.groups.group)[:, None, None], "
    first += "self._keys.stored([0]).scale, by_channel.scale)"
    then(patch, f"by_channel = by_channel._replace(scale={first}) if {there} else by_channel")
