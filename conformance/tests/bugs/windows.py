"""Bugs in windows: what a query sees, what is stored, truncated and freed."""

from bugs.attention import masked_tokens_weigh_zero_times_nan
from bugs.plant import bug, hidden, in_source, real
from kvref.attention import Sight
from kvref.backend import ReferenceBackend
from kvref.block_tables import BlockTables
from kvref.windowed import WindowedCache

INIT = "kvref.windowed.WindowedCache.__init__"
STEP = "kvref.windowed.WindowedCache.step"
SLOTS = "kvref.windowed.WindowedCache._slots"
WRITE = "kvref.windowed.WindowedCache._write"
TRUNCATE = "kvref.windowed.WindowedCache.truncate"
FIRST = "kvref.attention.Sight.first"


@bug("WIN-01")
def a_window_counts_the_tokens_before_the_query(patch):
    in_source(patch, FIRST, "LONGEST) + 1", "LONGEST)")


@bug("WIN-01")
def a_window_is_one_too_short(patch):
    in_source(patch, FIRST, "LONGEST) + 1", "LONGEST) + 1 + (self.window > 1)")


@bug("WIN-01")
def a_window_of_one_sees_all(patch):
    in_source(patch, FIRST, "if self.window is None", "if self.window in (None, 1)")


@bug("WIN-02")
def a_step_writes_before_it_attends(patch):
    """Tokens that its first queries see are overwritten."""
    step = WindowedCache.step

    def overwritten(self, query, keys, values, scale=None):
        others = WindowedCache(self.config, self._backend)
        held = [at for at in range(self._first, self.length) if at >= self.length + len(keys) - self._ring]
        others.length = held[0] if held else self.length
        others._first = max(others.length, self.config.sinks)
        for at in held:
            others.append(*self.read([at]))
        self.append(keys, values)
        return step(others, query, keys, values, scale)

    patch.setattr(WindowedCache, "step", overwritten)


@bug("WIN-02")
def all_queries_of_a_step_see_what_the_last_one_sees(patch):
    in_source(patch, STEP, "self._attended(query, new,", "self._attended(query, np.full(len(new), self.length + len(new) - 1),")


@bug("WIN-02")
def later_tokens_of_a_step_are_seen(patch):
    patch.setattr(Sight, "sees", lambda self, query, token: (token >= self.first(query)) | (token < self.sinks))


@bug("WIN-02")
def a_ring_is_read_in_the_order_of_its_slots(patch):
    in_source(patch, STEP, "self._slots(held[start:stop])", "np.sort(self._slots(held[start:stop]))")


@bug("WIN-03")
def a_ring_turns_a_token_late(patch):
    """Once it is exactly full, the next token overwrites the newest one."""
    in_source(patch, SLOTS, "% self._ring", "% max(1, self._ring - 1)")


@bug("WIN-03")
def a_dropped_position_is_read_as_what_lies_there_now(patch):
    in_source(patch, "kvref.windowed.WindowedCache.read", "(wanted < self._first)", "(wanted < 0)")


@bug("WIN-03")
def the_length_is_what_is_stored(patch):
    in_source(patch, WRITE, "self.length, self._first = end,", "self.length, self._first = min(end, self._ring),")


@bug("WIN-04")
def nothing_is_ever_dropped(patch):
    in_source(patch, INIT, "self._ring = config.window + config.rollback", "self._ring = 10**4")


@bug("WIN-04")
def the_window_is_counted_in_calls(patch):
    in_source(
        patch, WRITE,
        "max(self._first, end - self._ring)", "max(self._first, self.config.sinks + self.calls - self.config.window)",
        "end = self.length", "self.calls = getattr(self, 'calls', 0) + 1\n    end = self.length",
    )  # fmt: skip
    in_source(patch, INIT, "config.window + config.rollback", "10**4")


@bug("WIN-05")
def sinks_lie_in_the_ring(patch):
    in_source(patch, SLOTS, "sinks + (positions - sinks) % self._ring", "positions % (sinks + self._ring)")


@bug("WIN-05")
def sinks_are_kept_and_not_seen(patch):
    in_source(patch, INIT, "Sight(config.window, config.sinks,", "Sight(config.window, 0,")


@bug("WIN-05")
def a_sink_too_many_is_seen(patch):
    in_source(patch, "kvref.attention.Sight.sees", "token < self.sinks", "token <= self.sinks")


@bug("WIN-05")
def nothing_is_stored_where_sinks_fill_the_window(patch):
    in_source(patch, WRITE, "(new >= end - self._ring)", "((new >= end - self._ring) & (self.config.sinks < self.config.window))")


@bug("WIN-05")
def sinks_are_those_of_the_first_call(patch):
    in_source(patch, WRITE, "(new < self.config.sinks)", "((new < self.config.sinks) & (self.length == 0))")


@bug("WIN-06")
def what_was_overwritten_is_gone_back_to(patch):
    in_source(patch, TRUNCATE, "first < min(self._first, length)", "False")


@bug("WIN-06")
def nothing_is_gone_back_to(patch):
    in_source(patch, TRUNCATE, "first < min(self._first, length)", "length < self.length")


@bug("WIN-06")
def the_ring_has_no_room_for_a_draft(patch):
    in_source(patch, INIT, "config.window + config.rollback", "config.window")


@bug("WIN-06")
def a_ring_goes_on_where_the_draft_ended(patch):
    """Truncation sets the length, but the slot of the next token is counted separately."""
    in_source(patch, SLOTS, "(positions - sinks) %", "(positions - sinks + self.gone) %")
    in_source(patch, INIT, "self.length = 0", "self.length = self.gone = 0")
    in_source(patch, TRUNCATE, "self.length, self._first =", "self.gone += self.length - length\n    self.length, self._first =")


@bug("WIN-07")
def a_chunk_is_a_window(patch):
    in_source(patch, FIRST, "np.maximum(first, query // self.chunk * self.chunk) if self.chunk else first", "first")


@bug("WIN-07")
def a_chunk_begins_a_token_late(patch):
    in_source(patch, FIRST, "query // self.chunk * self.chunk", "np.minimum(query, query // self.chunk * self.chunk + 1)")


@bug("WIN-07")
def the_last_token_of_a_chunk_begins_the_next(patch):
    in_source(patch, FIRST, "query // self.chunk * self.chunk", "np.minimum(query, (query + 1) // self.chunk * self.chunk)")


@bug("WIN-08")
def a_logit_sink_is_left_out(patch):
    attend = ReferenceBackend.attend
    patch.setattr(ReferenceBackend, "attend", lambda self, *inputs: attend(self, *inputs[:5]))


@bug("WIN-08")
def a_logit_sink_is_scaled_as_a_score(patch):
    in_source(patch, "kvref.backend.ReferenceBackend.attend", "logit_sink[None, :]", "scale * logit_sink[None, :]")


@bug("WIN-08")
def all_heads_have_the_first_ones_sink(patch):
    in_source(patch, "kvref.backend.ReferenceBackend.attend", "logit_sink[None, :]", "(0 * logit_sink + logit_sink[0])[None, :]")


@bug("WIN-08")
def minus_infinity_is_a_sink_of_zero(patch):
    in_source(
        patch, "kvref.backend.ReferenceBackend.attend", "logit_sink[None, :]", "xp.maximum(logit_sink, xp.zeros(1))[None, :]"
    )


RELEASE = "kvref.block_sequences.PagedSequences.release_before"


@bug("WIN-09")
def a_block_goes_that_is_still_seen(patch):
    in_source(patch, RELEASE, "position // self._tables.block_size", "-(-position // self._tables.block_size)")


@bug("WIN-09")
def a_block_stays_that_is_not_seen(patch):
    in_source(patch, RELEASE, "position // self._tables.block_size", "max(0, position - 1) // self._tables.block_size")


@bug("WIN-09")
def blocks_are_given_back_twice(patch):
    in_source(patch, "kvref.block_tables.BlockTables.release", "layer[entry] = NO_BLOCK", "pass")


@bug("WIN-09")
def what_was_given_back_is_read_as_somebody_elses(patch):
    in_source(
        patch,
        "kvref.block_sequences.PagedSequences._check_position",
        "if position < (first := int(self._tables.first(table).max()))",
        "if False",
    )


@bug("WIN-09")
def a_fork_takes_what_was_given_back(patch):
    in_source(
        patch,
        "kvref.block_tables.BlockTables.fork",
        ", self.released[new] = self.lengths[table], self.released[table]",
        " = self.lengths[table]",
    )


@bug("WIN-09")
def a_table_that_is_closed_is_released_for_the_next(patch):
    in_source(patch, "kvref.block_tables.BlockTables.cut", "self.released[table] = ", "_ = ")


@bug("WIN-09")
def a_cut_below_what_was_given_back_goes_through(patch):
    in_source(
        patch,
        "kvref.block_sequences.PagedSequences.truncate",
        "length < (first := int(self._tables.first(table).max()))",
        "False",
    )


@bug("WIN-09")
def the_first_layer_alone_gives_back(patch):
    release = BlockTables.release

    def first_only(self, table, count):
        blocks = release(self, table, count)
        return blocks[:: self.num_layers]

    patch.setattr(BlockTables, "release", first_only)


@hidden("windowed", "WIN-06")
def a_draft_is_not_gone_back_from_to_where_the_ring_begins_anew(patch):
    in_source(patch, TRUNCATE, "first < min(self._first, length)", "length > self._ring and length % self._ring == 0")


@hidden("windowed", "ATTN-07")
def what_left_the_window_weighs_zero_times_nan(patch):
    masked_tokens_weigh_zero_times_nan(patch)
    patch.setitem(Sight.first.__globals__, "_seen_by_any", lambda at, positions, sight: [slice(0, len(positions))])


@hidden("windowed", "WIN-02")
def a_step_as_long_as_the_ring_forgets_its_first_token(patch):
    in_source(
        patch,
        STEP,
        "np.concatenate([held, new])",
        "np.concatenate([held, new + (new == self.length) * (len(new) == self._ring)])",
    )


@hidden("windowed", "WIN-05")
def sinks_are_not_seen_when_the_ring_has_turned_twice(patch):
    in_source(
        patch, STEP, "held, new = self._positions()",
        "held, new = self._positions()[self.config.sinks * (self.length > self.config.sinks + 2 * self._ring) :]",
    )  # fmt: skip


@real("windowed")
def the_second_piece_of_queries_begins_its_window_anew(patch):
    in_source(
        patch,
        "kvref.windowed.attended",
        "seen = _seen_by_any(piece, positions, sight)",
        "seen = _seen_by_any(piece if not start else piece[1:], positions, sight)",
    )


@real("windowed")
def a_slot_is_a_byte(patch):
    in_source(patch, SLOTS, "(positions - sinks) % self._ring", "(positions - sinks) % self._ring % 256")


@real("windowed")
def a_position_is_a_float16(patch):
    """float16 cannot distinguish 2049 from 2048."""
    in_source(
        patch, "kvref.attention.Sight.sees", "token >= self.first(query)", "np.float16(token) >= np.float16(self.first(query))"
    )


@real("paged")
def a_window_past_a_thousand_tokens_gives_back_a_block_more(patch):
    in_source(
        patch, RELEASE, "position // self._tables.block_size", "(position + (position > 500) * 15) // self._tables.block_size"
    )


@real("attention")
def a_window_is_of_whole_tiles(patch):
    first = Sight.first

    def tiled(self, query):
        found = first(self, query)
        return found // 64 * 64 if (self.window or 0) > 200 else found

    patch.setattr(Sight, "first", tiled)
