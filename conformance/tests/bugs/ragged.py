"""Bugs in the family `ragged`."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.errors import CapacityExceeded, RowOutOfRange
from kvref.ragged import RaggedCache

LENGTH, APPEND, EXTEND, FILTER, TRIM, ATTEND, NEW_ROWS, ROW = (
    f"kvref.ragged.RaggedCache.{name}" for name in ("length", "append", "extend", "filter", "trim", "attend", "_new_rows", "_row")
)
COUNTS = "kvref.ragged._checked_counts"


@bug("RAGGED-01")
def append_puts_tokens_first(patch):
    in_source(patch, APPEND, "[old_keys, keys]", "[keys, old_keys]")


@bug("RAGGED-01")
def padding_on_the_right_is_stored(patch):
    in_source(patch, NEW_ROWS, "np.arange(start, start + count)", "np.arange(start, columns)")


@bug("RAGGED-01")
def padding_on_the_left_is_read_instead_of_tokens(patch):
    in_source(patch, NEW_ROWS, "columns - count if left else 0", "0")


@bug("RAGGED-01")
def padding_on_the_left_is_that_of_the_first_row(patch):
    in_source(patch, NEW_ROWS, "columns - count if left", "columns - counted[0] if left")


@bug("RAGGED-01")
def a_negative_row_counts_from_the_end(patch):
    def row(self, row):
        if not -self.batch_size <= row < self.batch_size:
            raise RowOutOfRange(f"row: got {row}")
        return row

    patch.setattr(RaggedCache, "_row", row)


@bug("RAGGED-01")
def values_have_another_padding_than_keys(patch):
    in_source(
        patch, NEW_ROWS, "parts.append((new_keys, new_values))",
        "parts.append((new_keys, xp.asarray(values[row, :, columns - count :, :], copy=True)))",
    )  # fmt: skip


@bug("RAGGED-02")
def the_length_is_that_of_the_longest_row(patch):
    in_source(
        patch, LENGTH, "self._rows[self._row(row)][0].shape[1]", "max(k.shape[1] for k, _ in self._rows[: self._row(row) + 99])"
    )


@bug("RAGGED-03")
def nan_in_padding_raises(patch):
    in_source(
        patch,
        NEW_ROWS,
        "    parts = []",
        "    if not (np.isfinite(np.asarray(keys)).all()):\n        raise ValueError('NaN')\n    parts = []",
    )


def attend_over_padding(patch, score):
    """Append one token of padding to the tokens of shorter rows, whose keys and values are those of the padding."""
    new_rows, attend = RaggedCache._new_rows, RaggedCache.attend

    def noting(self, keys, values, counts, left, rows, what):
        parts = new_rows(self, keys, values, counts, left, rows, what)
        if counts is not None and min(counts) < keys.shape[2] and not left:
            self.padding = keys[int(np.argmin(counts)), :, -1:, :], values[int(np.argmin(counts)), :, -1:, :]
        return parts

    def with_padding(self, query, scale=None, causal=False):
        rows, padding = self._rows, getattr(self, "padding", None)
        longest = max(keys.shape[1] for keys, _ in rows)
        if padding is not None and score(padding):
            self._rows = [
                tuple(np.concatenate([own, other], axis=1) for own, other in zip(row, padding, strict=True))
                if row[0].shape[1] < longest
                else row
                for row in rows
            ]
        try:
            return attend(self, query, scale, causal)
        finally:
            self._rows = rows

    patch.setattr(RaggedCache, "_new_rows", noting)
    patch.setattr(RaggedCache, "attend", with_padding)


@bug("RAGGED-03")
def attention_contains_large_padding(patch):
    attend_over_padding(patch, lambda padding: np.abs(padding[0]).max() > 100)


@bug("RAGGED-03")
def attention_contains_nan_of_padding(patch):
    attend_over_padding(patch, lambda padding: not np.isfinite(padding[0]).all())


@bug("RAGGED-04")
def attention_reads_the_first_row(patch):
    in_source(patch, ATTEND, "(query[row, ...], *pair)", "(query[row, ...], *self._rows[0])")


@bug("RAGGED-04")
def a_causal_mask_ends_at_the_longest_row(patch):
    attend = RaggedCache.attend

    def aligned(self, query, scale=None, causal=False):
        if not causal or len({keys.shape[1] for keys, _ in self._rows}) == 1:
            return attend(self, query, scale, causal)
        whole = attend(self, query, scale, False)
        longest = int(np.argmax([keys.shape[1] for keys, _ in self._rows]))
        out = np.array(whole)
        out[longest] = attend(self, query, scale, True)[longest]
        return out

    patch.setattr(RaggedCache, "attend", aligned)


@bug("RAGGED-04")
def causal_is_ignored(patch):
    in_source(patch, ATTEND, "causal=causal", "causal=False")


@bug("RAGGED-04")
def the_first_queries_see_the_first_token(patch):
    attend = RaggedCache.attend

    def seeing(self, query, scale=None, causal=False):
        out = np.array(attend(self, query, scale, causal))
        for row, (_, values) in enumerate(self._rows):
            if causal and 0 < values.shape[1] < query.shape[2]:
                group = query.shape[1] // values.shape[0]
                out[row, :, : query.shape[2] - values.shape[1]] = np.repeat(values[:, :1], group, axis=0)
        return out

    patch.setattr(RaggedCache, "attend", seeing)


@bug("RAGGED-04")
def an_empty_row_attends_to_nan(patch):
    attend = RaggedCache.attend

    def broken(self, query, scale=None, causal=False):
        out = np.array(attend(self, query, scale, causal))
        out[[not keys.shape[1] for keys, _ in self._rows]] = np.nan
        return out

    patch.setattr(RaggedCache, "attend", broken)


@bug("RAGGED-05")
def a_row_gets_at_least_one_token(patch):
    in_source(
        patch,
        NEW_ROWS,
        "    start = columns",
        "    count = max(count, 1) if what == 'append' else count\n        start = columns",
    )


@bug("RAGGED-05")
def a_row_without_new_tokens_is_emptied(patch):
    in_source(patch, APPEND, "for (old_keys, old_values), (keys, values) in zip(self._rows, new, strict=True)",
              "for (old_keys, old_values), (keys, values) in zip(\n"
              "        [row if more[0].shape[1] else more for row, more in zip(self._rows, new)], new, strict=True)")  # fmt: skip


@bug("RAGGED-06")
def filter_keeps_the_order(patch):
    in_source(patch, FILTER, "[self._row(row) for row in rows]", "sorted(self._row(row) for row in rows)")


@bug("RAGGED-06")
def filter_replaces_rows_one_after_another(patch):
    in_source(
        patch, FILTER, "self._rows = [self._rows[row] for row in chosen]",
        "for i, row in enumerate(chosen):\n        self._rows[i:i + 1] = [self._rows[row]]\n"
        "    self._rows = self._rows[: len(chosen)]",
    )  # fmt: skip


@bug("RAGGED-06")
def filter_leaves_the_values(patch):
    in_source(
        patch, FILTER, "[self._rows[row] for row in chosen]",
        "[(self._rows[row][0], self._rows[i if i < len(self._rows) else row][1][:, : self._rows[row][0].shape[1]])"
        " for i, row in enumerate(chosen)]",
    )  # fmt: skip


@bug("RAGGED-06")
def filter_of_no_rows_empties_the_batch(patch):
    in_source(patch, FILTER, "if not chosen:", "if False:")


@bug("RAGGED-06")
def filter_drops_unknown_rows(patch):
    in_source(patch, FILTER, "[self._row(row) for row in rows]", "[row for row in rows if row in range(len(self._rows))] or [0]")


@bug("RAGGED-06")
def filter_removes_repeated_rows(patch):
    in_source(patch, FILTER, "[self._row(row) for row in rows]", "list(dict.fromkeys(self._row(row) for row in rows))")


@bug("RAGGED-06")
def copies_of_a_row_share_later_tokens(patch):
    keep, append = RaggedCache.filter, RaggedCache.append

    def filter(self, rows):
        keep(self, rows)
        self.sources = list(rows)

    def sharing(self, *args, **named):
        append(self, *args, **named)
        sources = getattr(self, "sources", [])
        self._rows = [self._rows[sources.index(sources[i])] if i < len(sources) else row for i, row in enumerate(self._rows)]

    patch.setattr(RaggedCache, "filter", filter)
    patch.setattr(RaggedCache, "append", sharing)


@bug("RAGGED-07")
def extend_puts_rows_first(patch):
    in_source(patch, EXTEND, "self._rows += self._new_rows", "self._rows[:0] = self._new_rows")


@bug("RAGGED-07")
def extend_cuts_longer_rows(patch):
    in_source(
        patch, EXTEND, "self._rows += self._new_rows(keys, values, counts, left, \"rows\", \"extend\")",
        "most = max(k.shape[1] for k, _ in self._rows) or 99\n"
        "    self._rows += [(k[:, :most], v[:, :most]) for k, v in self._new_rows(keys, values, counts, left, 'rows', 'extend')]",
    )  # fmt: skip


@bug("RAGGED-07")
def extend_ignores_rows_without_tokens(patch):
    extend = RaggedCache.extend

    def ignoring(self, *args, **named):
        present = len(self._rows)
        extend(self, *args, **named)
        self._rows = self._rows[:present] + [row for row in self._rows[present:] if row[0].shape[1]]

    patch.setattr(RaggedCache, "extend", ignoring)


@bug("RAGGED-07")
def extend_with_longer_rows_pads_the_present_ones(patch):
    extend = RaggedCache.extend

    def padding(self, keys, values, counts=None, left=False):
        present = len(self._rows)
        extend(self, keys, values, counts, left)
        longest = max(k.shape[1] for k, _ in self._rows[present:])
        if longest > max(k.shape[1] for k, _ in self._rows[:present]):
            self._rows[0] = tuple(np.pad(part, ((0, 0), (longest - part.shape[1], 0), (0, 0))) for part in self._rows[0])

    patch.setattr(RaggedCache, "extend", padding)


@bug("RAGGED-08")
def trim_removes_the_first_tokens(patch):
    in_source(
        patch,
        TRIM,
        "(keys[:, :length, :], values[:, :length, :])",
        "(keys[:, keys.shape[1] - length :], values[:, keys.shape[1] - length :])",
    )


@bug("RAGGED-08")
def trim_removes_as_many_tokens_from_every_row(patch):
    in_source(patch, TRIM, "length - count for length, count in", "max(0, length - max(counts)) for length, count in")


@bug("RAGGED-08")
def trim_empties_shorter_rows(patch):
    in_source(
        patch,
        TRIM,
        "_checked_counts(counts, lengths)",
        "[min(each) for each in zip(_checked_counts(counts, [9**9] * len(lengths)), lengths)]",
    )


@bug("RAGGED-08")
def trim_aligned_to_the_longest_row(patch):
    in_source(patch, TRIM, "length - count for length, count in", "min(length, max(lengths) - count) for length, count in")


@bug("RAGGED-09")
def one_count_stands_for_all_rows(patch):
    in_source(
        patch,
        COUNTS,
        "if len(counts) != len(most):",
        "if len(counts) == 1:\n        counts = list(counts) * len(most)\n    if len(counts) != len(most):",
    )


@bug("RAGGED-09")
def further_counts_are_ignored(patch):
    in_source(patch, COUNTS, "if len(counts) != len(most):", "counts = counts[: len(most)]\n    if len(counts) != len(most):")


@bug("RAGGED-09")
def a_negative_count_is_none(patch):
    in_source(patch, COUNTS, "in_range(count,", "in_range(max(count, 0),")


@bug("RAGGED-09")
def a_count_beyond_the_columns_is_all(patch):
    in_source(patch, COUNTS, "in_range(count,", "in_range(min(count, limit),")


@bug("RAGGED-10")
def padding_takes_room(patch):
    in_source(patch, NEW_ROWS, "zip(old, counted, strict=True)", "zip(old, [columns] * number, strict=True)")


@bug("RAGGED-10")
def the_lengths_of_all_rows_are_added(patch):
    append = RaggedCache.append

    def shared(self, keys, values, counts=None, left=False):
        used = getattr(self, "used", 0) + keys.shape[2]
        if used > self.config.max_tokens and keys.shape[2] > max(counts or [keys.shape[2]]) - 1 and counts:
            raise CapacityExceeded(f"append: expected at most {self.config.max_tokens} columns, got {used}")
        append(self, keys, values, counts, left)
        self.used = used

    patch.setattr(RaggedCache, "append", shared)


@bug("RAGGED-10")
def one_token_too_many_is_accepted(patch):
    in_source(patch, NEW_ROWS, "> config.max_tokens", "> config.max_tokens + 1")


@bug("RAGGED-10")
def the_first_row_is_limited(patch):
    in_source(
        patch, NEW_ROWS, "max(map(sum, zip(old, counted, strict=True)), default=0)", "(old[0] + counted[0] if number else 0)"
    )


@hidden("ragged", "RAGGED-01")
def the_second_append_after_a_filter_reverses_a_row(patch):
    keep, append = RaggedCache.filter, RaggedCache.append

    def filter(self, rows):
        keep(self, rows)
        self.appends = 0

    def reversing(self, keys, values, counts=None, left=False):
        append(self, keys, values, counts, left)
        self.appends = getattr(self, "appends", 9) + (keys.shape[2] > 0)
        if self.appends == 2 and left and self._rows[0][0].shape[1]:
            self._rows[0] = tuple(part[:, ::-1] for part in self._rows[0])

    patch.setattr(RaggedCache, "filter", filter)
    patch.setattr(RaggedCache, "append", reversing)


@hidden("ragged", "RAGGED-04")
def attention_after_a_trim_sees_the_last_removed_token(patch):
    trim, attend = RaggedCache.trim, RaggedCache.attend

    def keeping(self, counts):
        rows = self._rows
        trim(self, counts)
        self.removed = rows, self._rows

    def seeing(self, query, scale=None, causal=False):
        rows, trimmed = getattr(self, "removed", (None, None))
        if self._rows is not trimmed or len({keys.shape[1] for keys, _ in trimmed}) < 3:
            return attend(self, query, scale, causal)
        self._rows = rows
        try:
            return attend(self, query, scale, causal)
        finally:
            self._rows = trimmed

    patch.setattr(RaggedCache, "trim", keeping)
    patch.setattr(RaggedCache, "attend", seeing)


@bug("RAGGED-04")
def without_a_scale_it_is_1_over_head_dim(patch):
    attend = RaggedCache.attend

    def scaled(self, *given, **named):
        if len(given) <= 1 and named.get("scale") is None:
            named["scale"] = 1 / self.config.head_dim
        return attend(self, *given, **named)

    patch.setattr(RaggedCache, "attend", scaled)


@bug("RAGGED-03")
def very_large_padding_is_seen(patch):
    append = RaggedCache.append

    def seeing(self, keys, values, counts=None, left=False):
        append(self, keys, values, counts, left)
        if np.max(np.abs(np.nan_to_num(np.asarray(values), nan=0.0, posinf=0.0, neginf=0.0)), initial=0) > 1e8:
            self._rows = [(old_keys, old_values + 1) for old_keys, old_values in self._rows]

    patch.setattr(RaggedCache, "append", seeing)
