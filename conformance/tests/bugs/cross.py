"""Bugs in the family `cross`."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.cross import CrossCache
from kvref.errors import RowOutOfRange

WRITE, READ, LENGTH, ATTEND, FILTER, CLEAR, SOURCE = (
    f"kvref.cross.CrossCache.{name}"
    for name in ("write_source", "read_source", "source_length", "attend_source", "filter", "clear", "_source")
)
STORED = "self._sources[row] = new_keys, new_values"


@bug("CROSS-01")
def sources_are_written_in_the_order_of_the_rows(patch):
    in_source(
        patch, WRITE, "enumerate(zip(chosen, counted, strict=True))", "enumerate(zip(sorted(chosen), counted, strict=True))"
    )


@bug("CROSS-01")
def padding_is_part_of_the_source(patch):
    in_source(patch, WRITE, "part[at, :, :count, :]", "part[at, :, :, :]")


@bug("CROSS-01")
def a_source_begins_after_its_padding(patch):
    in_source(patch, WRITE, "part[at, :, :count, :]", "part[at, :, columns - count :, :]")


@bug("CROSS-01")
def a_source_is_written_to_all_rows_without_one(patch):
    in_source(patch, WRITE, STORED, "self._sources = [(new_keys, new_values) if i == row or s is None else s\n"
              "                         for i, s in enumerate(self._sources)]")  # fmt: skip


@bug("CROSS-01")
def values_of_a_source_are_its_keys(patch):
    in_source(patch, READ, "xp.asarray(values, copy=True)", "xp.asarray(keys, copy=True)")


@bug("CROSS-01")
def the_source_length_is_that_of_the_longest_source(patch):
    in_source(patch, LENGTH, "self._source(row)[0].shape[1]",
              "max([self._source(row)[0].shape[1], *(s[0].shape[1] for s in self._sources if s)])")  # fmt: skip


@bug("CROSS-01")
def a_negative_row_counts_from_the_end(patch):
    def row(self, row):
        if not -self.batch_size <= row < self.batch_size:
            raise RowOutOfRange(f"row: got {row}")
        return row

    patch.setattr(CrossCache, "_row", row)


@bug("CROSS-01")
def rows_that_a_filter_removed_have_no_source(patch):
    in_source(
        patch, SOURCE,
        "    source = ",
        "    if isinstance(row, int) and self.batch_size <= row < self.config.batch_size:\n"
        "        raise SourceNotWritten(f'row {row}')\n    source = ",
    )  # fmt: skip


@bug("CROSS-02")
def an_unwritten_source_is_empty(patch):
    in_source(
        patch,
        SOURCE,
        "if source is None:",
        "if source is None:\n        source = (self._tokens.read(row)[0][:, :0],) * 2\n    if False:",
    )


@bug("CROSS-02")
def attention_over_an_unwritten_source_is_zeros(patch):
    in_source(patch, ATTEND, "[self._source(row) for row in range(self.batch_size)]",
              "[s if s else (self._tokens.read(0)[0][:, :0],) * 2 for s in self._sources]")  # fmt: skip


@bug("CROSS-02")
def a_source_without_entries_is_not_written(patch):
    in_source(patch, SOURCE, "if source is None:", "if source is None or not source[0].shape[1]:")


@bug("CROSS-03")
def a_second_source_replaces_the_first(patch):
    in_source(patch, WRITE, "if self._sources[row] is not None or row in chosen[:at]:", "if row in chosen[:at]:")


@bug("CROSS-03")
def a_second_source_of_the_same_length_replaces_the_first(patch):
    in_source(patch, WRITE, "if self._sources[row] is not None or",
              "if self._sources[row] is not None and self._sources[row][0].shape[1] != counted[at] or")  # fmt: skip


@bug("CROSS-03")
def a_second_source_is_ignored(patch):
    in_source(patch, WRITE, "if self._sources[row] is not None or row in chosen[:at]:",
              "if self._sources[row] is not None:\n            return\n        if row in chosen[:at]:")  # fmt: skip


@bug("CROSS-03")
def rows_before_the_refused_one_are_written(patch):
    write = CrossCache.write_source

    def one_by_one(self, rows, keys, values, counts=None):
        if counts is not None and len(counts) != len(rows):
            write(self, rows, keys, values, counts)
        for at, row in enumerate(rows):
            write(self, [row], keys[at : at + 1], values[at : at + 1], None if counts is None else [counts[at]])

    patch.setattr(CrossCache, "write_source", one_by_one)


@bug("CROSS-03")
def a_repeated_row_gets_its_last_source(patch):
    in_source(patch, WRITE, " or row in chosen[:at]", "")


@bug("CROSS-04")
def trim_cuts_sources(patch):
    trim = CrossCache.trim

    def both(self, counts):
        trim(self, counts)
        for row, count in enumerate(counts):
            if self._sources[row] and count:
                self._sources[row] = tuple(part[:, : max(0, part.shape[1] - count)] for part in self._sources[row])

    patch.setattr(CrossCache, "trim", both)


@bug("CROSS-04")
def append_replaces_the_last_entry(patch):
    append = CrossCache.append

    def overwriting(self, keys, values, counts=None):
        append(self, keys, values, counts)
        for row, source in enumerate(self._sources):
            if source and source[0].shape[1] > 2 and keys.shape[2]:
                self._sources[row] = tuple(
                    np.concatenate([part[:, :-1], new[row][:, :1]], axis=1)
                    for part, new in zip(source, (keys, values), strict=True)
                )

    patch.setattr(CrossCache, "append", overwriting)


@bug("CROSS-04")
def a_source_takes_positions(patch):
    length = CrossCache.length
    patch.setattr(
        CrossCache, "length", lambda self, row: length(self, row) + (self._sources[row][0].shape[1] if self._sources[row] else 0)
    )
    in_source(patch, CLEAR, "self.length(each)", "self._tokens.length(each)")


@bug("CROSS-04")
def write_source_removes_tokens(patch):
    write = CrossCache.write_source

    def restarting(self, rows, keys, values, counts=None):
        write(self, rows, keys, values, counts)
        self._tokens.trim([self._tokens.length(row) if row in rows else 0 for row in range(self.batch_size)])

    patch.setattr(CrossCache, "write_source", restarting)


@bug("CROSS-05")
def attention_to_sources_is_causal(patch):
    in_source(patch, ATTEND, "scale=scale,", "scale=scale, causal=True,")


@bug("CROSS-05")
def attention_reads_the_first_source(patch):
    in_source(patch, ATTEND, "(query[row, ...], *pair)", "(query[row, ...], *sources[0])")


@bug("CROSS-05")
def attention_reads_tokens_too(patch):
    in_source(
        patch, ATTEND, "*pair)", "*[xp.concat(parts, axis=1) for parts in zip(pair, self.read(row))])"
    )  # fmt: skip


@bug("CROSS-05")
def a_window_cuts_the_source(patch):
    in_source(patch, ATTEND, "[self._source(row) for row in range(self.batch_size)]",
              "[tuple(p[:, -4:, :] for p in self._source(row)) for row in range(self.batch_size)]")  # fmt: skip


def attend_over_padding(patch, seen):
    """Let attention see the last column of padding, if `seen` returns true for its keys."""
    write, attend = CrossCache.write_source, CrossCache.attend_source

    def noting(self, rows, keys, values, counts=None):
        write(self, rows, keys, values, counts)
        if counts is not None and min(counts) < keys.shape[2]:
            at = int(np.argmin(counts))
            self.padding = rows[at], keys[at, :, -1:, :], values[at, :, -1:, :]

    def seeing(self, query, scale=None):
        sources, (row, *padding) = self._sources, getattr(self, "padding", (0, None))
        if padding[0] is None or None in [s and 0 for s in sources] or row >= len(sources) or not seen(padding[0]):
            return attend(self, query, scale)
        self._sources = list(sources)
        self._sources[row] = tuple(np.concatenate(pair, axis=1) for pair in zip(sources[row], padding, strict=True))
        try:
            return attend(self, query, scale)
        finally:
            self._sources = sources

    patch.setattr(CrossCache, "write_source", noting)
    patch.setattr(CrossCache, "attend_source", seeing)


@bug("CROSS-05")
def attention_contains_large_padding(patch):
    attend_over_padding(patch, lambda keys: np.isfinite(keys).all() and np.abs(keys).max() > 100)


@bug("CROSS-05")
def attention_contains_nan_of_padding(patch):
    attend_over_padding(patch, lambda keys: not np.isfinite(keys).all())


@bug("CROSS-05")
def nan_in_padding_raises(patch):
    in_source(patch, WRITE, "columns = keys.shape[2]",
              "columns = keys.shape[2]\n    if not xp.all(xp.isfinite(keys)):\n        raise ValueError('NaN')\n")  # fmt: skip


@bug("CROSS-05")
def a_row_without_entries_attends_to_nan(patch):
    attend = CrossCache.attend_source

    def broken(self, query, scale=None):
        out = np.array(attend(self, query, scale))
        out[[not keys.shape[1] for keys, _ in self._sources]] = np.nan
        return out

    patch.setattr(CrossCache, "attend_source", broken)


@bug("CROSS-06")
def filter_leaves_sources(patch):
    in_source(patch, FILTER, "[self._sources[self._row(row)] for row in rows]",
              "[self._sources[i if i < len(self._sources) else row] for i, row in enumerate(rows)]")  # fmt: skip


@bug("CROSS-06")
def filter_leaves_tokens(patch):
    in_source(patch, FILTER, "self._tokens.filter(rows)",
              "[self._row(row) for row in rows]\n"
              "    self._tokens.filter([min(i, self.batch_size - 1) for i, _ in enumerate(rows)])")  # fmt: skip


@bug("CROSS-06")
def filter_lets_unwritten_rows_have_the_source_of_another(patch):
    in_source(patch, FILTER, "[self._sources[self._row(row)] for row in rows]",
              "[self._sources[self._row(row)] or next((s for s in self._sources if s), None) for row in rows]")  # fmt: skip


@bug("CROSS-06")
def copies_of_a_row_are_cleared_together(patch):
    keep, clear = CrossCache.filter, CrossCache.clear

    def filter(self, rows):
        keep(self, rows)
        self.origins = list(rows)

    def clear_copies(self, row):
        clear(self, row)
        for other, origin in enumerate(getattr(self, "origins", [])):
            if origin == self.origins[row]:
                self._sources[other] = None

    patch.setattr(CrossCache, "filter", filter)
    patch.setattr(CrossCache, "clear", clear_copies)


@bug("CROSS-06")
def filter_of_unknown_rows_moves_sources(patch):
    keep = CrossCache.filter

    def early(self, rows):
        if len(rows) > 1:
            self._sources = [self._sources[row] if row in range(len(self._sources)) else None for row in rows]
            return self._tokens.filter(rows)
        return keep(self, rows)

    patch.setattr(CrossCache, "filter", early)


@hidden("cross", "CROSS-08")
@bug("CROSS-06")
def trim_trims_all_copies_of_a_row(patch):
    """Copies share their tokens until one of them gets another one."""
    trim = CrossCache.trim

    def shared(self, counts):
        rows = [id(keys) for keys, _ in self._tokens._rows]
        if len(counts) == len(rows):
            counts = [max(count for each, count in zip(rows, counts, strict=True) if each == row) for row in rows]
        trim(self, counts)

    patch.setattr(CrossCache, "trim", shared)


@bug("CROSS-07")
def clear_leaves_the_source(patch):
    in_source(patch, CLEAR, "self._sources[row] = None", "pass")


@bug("CROSS-07")
def clear_leaves_the_tokens(patch):
    in_source(patch, CLEAR, "self.length(each) if each == row else 0", "0")


@bug("CROSS-07")
def clear_removes_the_tokens_of_all_rows(patch):
    in_source(patch, CLEAR, "self.length(each) if each == row else 0", "self.length(each)")


@bug("CROSS-07")
def clear_of_an_unknown_row_clears_the_last(patch):
    in_source(patch, CLEAR, "row = self._row(row)", "row = min(row, self.batch_size - 1)")


@bug("CROSS-07")
def a_shorter_source_is_followed_by_old_entries(patch):
    clear, write = CrossCache.clear, CrossCache.write_source

    def noting(self, row):
        old = self._sources[row] if row in range(self.batch_size) else None
        clear(self, row)
        self.old = row, old

    def behind(self, rows, keys, values, counts=None):
        write(self, rows, keys, values, counts)
        row, old = getattr(self, "old", (0, None))
        if old and row in rows:
            self._sources[row] = tuple(
                np.concatenate([new, part[:, new.shape[1] :]], axis=1) for new, part in zip(self._sources[row], old, strict=True)
            )

    patch.setattr(CrossCache, "clear", noting)
    patch.setattr(CrossCache, "write_source", behind)


@bug("CROSS-08")
def tokens_follow_the_source_of_their_row(patch):
    read = CrossCache.read

    def both(self, row):
        pair = read(self, row)
        source = self._sources[row]
        return tuple(np.concatenate(parts, axis=1) for parts in zip(source, pair, strict=True)) if source else pair

    patch.setattr(CrossCache, "read", both)


@bug("CROSS-08")
def append_ignores_counts(patch):
    append = CrossCache.append
    patch.setattr(CrossCache, "append", lambda self, keys, values, counts=None: append(self, keys, values))


@bug("CROSS-08")
def trim_removes_at_most_the_tokens_of_a_row(patch):
    trim = CrossCache.trim

    def clamped(self, counts):
        lengths = [self._tokens.length(row) for row in range(self.batch_size)]
        trim(self, [min(count, n) for count, n in zip(counts, lengths, strict=True)] if len(counts) == len(lengths) else counts)

    patch.setattr(CrossCache, "trim", clamped)


@bug("CROSS-09")
def further_counts_of_sources_are_ignored(patch):
    in_source(
        patch, WRITE, "if len(counted) != len(chosen):", "counted = counted[: len(chosen)]\n    if len(counted) != len(chosen):"
    )


@bug("CROSS-09")
def a_count_beyond_the_columns_is_all(patch):
    in_source(patch, WRITE, "in_range(count,", "in_range(min(count, columns),")


@bug("CROSS-09")
def a_source_has_one_entry_too_many(patch):
    in_source(patch, WRITE, "> config.max_source", "> config.max_source + 1")


@bug("CROSS-09")
def padding_of_a_source_takes_room(patch):
    in_source(patch, WRITE, "max(counted, default=0)", "(columns if counted else 0)")


@bug("CROSS-09")
def sources_are_limited_by_max_tokens(patch):
    in_source(patch, WRITE, "> config.max_source", "> config.max_tokens")


@hidden("cross", "CROSS-06")
def the_second_filter_after_a_clear_swaps_sources(patch):
    keep, clear = CrossCache.filter, CrossCache.clear

    def counting(self, row):
        clear(self, row)
        self.filters = 0

    def filter(self, rows):
        keep(self, rows)
        self.filters = getattr(self, "filters", 9) + 1
        if self.filters == 2 and self.batch_size > 1:
            self._sources[:2] = self._sources[1::-1]

    patch.setattr(CrossCache, "clear", counting)
    patch.setattr(CrossCache, "filter", filter)


@bug("CROSS-05")
def without_a_scale_it_is_1_over_head_dim(patch):
    attend = CrossCache.attend_source

    def scaled(self, *given, **named):
        if len(given) <= 1 and named.get("scale") is None:
            named["scale"] = 1 / self.config.head_dim
        return attend(self, *given, **named)

    patch.setattr(CrossCache, "attend_source", scaled)
