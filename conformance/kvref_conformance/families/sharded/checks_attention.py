"""SHARD-02: attention merged from the partial results of all columns."""

import numpy as np

from kvref_conformance.checking.attending import LOUD, LOUD_SCALE, even, exact, normal
from kvref_conformance.checking.expect import may_raise, raises, same, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import fitted, held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.sharded.known import Known, grids, heads_and_rows
from kvref_conformance.outcome import NotOffered


@check("SHARD-02bc", "sharded")
def attention_is_that_of_all_tokens(subject: Subject) -> None:
    """Every length up to two blocks per column, which includes one token, empty columns and partly filled blocks."""
    for config in grids(subject):
        known = Known(subject, **config)
        turn = known.size * known.columns
        while len(known) < min(2 * turn + 1, known.room):
            known.append(1)
            known.attends(1, f"at {len(known)} tokens")
        for count in (2, turn, len(known), 0):
            known.attends(min(count, len(known)), f"at {len(known)} tokens")


@check("SHARD-02b", "sharded")
def each_query_head_reads_its_own_kv_head(subject: Subject) -> None:
    """Group sizes of models: 4 and 8 (Llama), and 7 (Qwen), which the number of head copies does not divide."""
    for config in heads_and_rows(subject):
        known = Known(subject, **config)
        known.append(7)
        for group in dict.fromkeys(subject.size("group_size", wanted) for wanted in (1, 2, 3, 4, 7, 8)):
            known.attends(2, f"of {known.row[0]} heads on {known.rows} rows, {group} query heads each", group)


@check("SHARD-02b", "sharded")
def the_column_that_has_the_token_decides(subject: Subject) -> None:
    """One token has almost all the weight, at every position, so the partial results of other columns hardly count."""
    scale = even(subject) * LOUD_SCALE
    for config in grids(subject, (1, 3), (2, 2), (4, 3)):
        for place in range(config["block_size"] * config["token_ranks"] + 1):
            known = Known(subject, **config)
            keys, values = known.tokens(min(known.room, config["block_size"] * config["token_ranks"] + 2))
            keys[:] = 0
            keys[place % len(keys)] = LOUD
            known.give(keys, values)
            query = np.ones((1, known.row[0] * subject.size("group_size", 2), known.row[1]), np.float32)
            known.attends_to(query, scale, f"with almost all weight on position {place % len(keys)} of {len(keys)}")
            known.attends_to(-query, scale, f"with almost no weight on position {place % len(keys)} of {len(keys)}")


@check("SHARD-02b", "sharded")
def large_scores_do_not_overflow(subject: Subject) -> None:
    """Scores are large, and positive in one column and negative in another."""
    for config in grids(subject, (1, 3), (2, 2)):
        known = Known(subject, **config)
        keys, values = known.tokens(min(known.room, 2 * known.size * known.columns))
        keys = held(subject, np.sign(keys) * 30)
        known.give(keys, values)
        query = normal(subject, 3 if len(known) > 2 else 1, known.row[0] * subject.size("group_size", 2), known.row[1]) * 30
        known.attends_to(held(subject, query), 1.0, "with large scores")


@check("SHARD-02bc", "sharded")
def a_query_sees_no_later_token_of_any_column(subject: Subject) -> None:
    """Later tokens have larger scores and other values, so attending to one changes the result visibly."""
    scale = even(subject) * LOUD_SCALE
    for config in grids(subject, (2, 3), (1, 2), (1, 4)):
        known = Known(subject, **config)
        keys, values = known.tokens(min(known.room, 2 * known.size * known.columns + 1))
        keys[:] = (np.arange(len(keys), dtype=np.float32) / 4)[:, None, None]
        known.give(held(subject, keys), values)
        heads = known.row[0] * subject.size("group_size", 2)
        for count in (2, known.size + 1, len(known)):
            query = np.ones((min(count, len(known)), heads, known.row[1]), np.float32)
            known.attends_to(query, scale, f"of {len(query)} queries, with scores that grow with the position")


@check("SHARD-02c", "sharded")
def what_is_not_seen_has_no_part(subject: Subject) -> None:
    """The last token is not finite. It must not affect the query before it, in any column."""
    for config in grids(subject, (1, 3), (2, 2)):
        for length in range(2, config["block_size"] * config["token_ranks"] + 2):
            known = Known(subject, **config)
            known.append(min(length, known.room) - 1)
            keys, values = known.tokens(1)
            values[:] = np.nan
            taken = False
            with may_raise("NonFinite"):
                known.cache.append(keys, values)
                taken = True
            if not taken:
                raise NotOffered("append of a token that is not finite")
            query = normal(subject, 2, known.row[0], known.row[1])
            want, bound = exact(
                subject, query[:1], known.keys, known.values, scale=even(subject), causal=True, ranks=known.columns
            )
            got = known.cache.attend(query, even(subject))[:1]
            within(got, want, bound, f"attention of the query before a NaN at position {len(known)}")


@check("SHARD-02b", "sharded")
def heads_stand_side_by_side(subject: Subject) -> None:
    """With one column nothing is merged, so each head's result is bit for bit independent of the other heads' queries."""
    config = fitted(subject, "sharded", token_ranks=1)
    if config["token_ranks"] != 1 or config["num_kv_heads"] == 1:
        raise NotOffered("several heads on one column of ranks")
    known = Known(subject, **config)
    known.append(9)
    group = subject.size("group_size", 2)
    query = normal(subject, 2, known.row[0] * group, known.row[1])
    got = known.cache.attend(query, even(subject))
    for head in range(known.row[0]):
        own = slice(head * group, (head + 1) * group)
        alone = np.zeros_like(query)
        alone[:, own] = query[:, own]
        same(
            known.cache.attend(alone, even(subject))[:, own],
            got[:, own],
            f"attention of kv head {head} with zero queries for the other heads, compared with all queries",
        )


@check("SHARD-02d", "sharded")
def more_queries_than_tokens_are_refused(subject: Subject) -> None:
    for config in grids(subject, (2, 3), (1, 2)):
        known = Known(subject, **config)
        query = normal(subject, 5, known.row[0], known.row[1])
        for count in (0, 1, 3):
            known.append(count - len(known))
            with raises("PositionOutOfRange"):
                known.cache.attend(query[: count + 1], even(subject))
            known.attends(count, f"at {count} tokens")
