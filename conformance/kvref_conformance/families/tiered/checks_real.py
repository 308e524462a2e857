"""LAW-18: production sizes, at which every tier is refilled many times."""

from kvref_conformance.checking.content import Written, belongs, pair_of_content
from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.real import affordable, edges
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.tiered.tiers import POLICY, settled
from kvref_conformance.oracle.rows import Reads


@check("LAW-18", "tiered")
def tokens_age_through_tiers_that_are_full(subject: Subject) -> None:
    turning_over(subject, 1, 64, (1, 127, 129, 300, 511, 1, 1, 16))


@check("LAW-18", "tiered", real=True)
def tokens_age_through_tiers_as_models_have_them(subject: Subject) -> None:
    turning_over(subject, 8, 128, (1, 127, 129, 300, 511, 1, 1, 16, 1024, 2048, 1))


def turning_over(subject: Subject, heads: int, dim: int, pieces: tuple[int, ...]) -> None:
    for store in subject.formats("q4", "q8", "int8", "float8_e4m3fn"):
        cache = new(
            subject, "tiered", num_kv_heads=heads, head_dim=dim, max_tokens=513, tail_length=130, warm_length=66,
            store_format=store, migration_batch=64,
        )  # fmt: skip
        config, at = cache.config, 0
        written = Written(config["num_kv_heads"], config["head_dim"])
        policy = {name: config[name] for name in POLICY}
        for count in (affordable(subject, each, len(pieces)) for each in pieces):
            cache.append(*pair_of_content(0, 0, range(at, at + count), written.heads, written.dim))
            at += count
        first = max(0, at - config["max_tokens"])
        equal(cache.total_tokens, at - first, f"total_tokens after {at} tokens")
        # Evicted tokens do not affect the others: a token is quantized with its own row only.
        given = pair_of_content(0, 0, range(first, at), written.heads, written.dim)
        wanted: tuple[Reads, Reads] = (settled(given[0], policy), settled(given[1], policy))
        written.up_to(0, 0, at)
        belongs(cache.read(), 0, 0, range(first, at), written, subject.level == "exact", wanted)


@check("LAW-18", "tiered")
def drafts_come_and_go_at_any_length(subject: Subject) -> None:
    for store in subject.formats("q4", "q8", "int8", "float8_e4m3fn"):
        cache = new(
            subject, "tiered", num_kv_heads=1, head_dim=64, max_tokens=900, tail_length=530, warm_length=66,
            store_format=store, migration_batch=64,
        )  # fmt: skip
        config, at = cache.config, 0
        written = Written(config["num_kv_heads"], config["head_dim"])
        policy = {name: config[name] for name in POLICY}
        newest = next(config[name] for name in ("tail_length", "warm_length", "max_tokens") if config[name])
        ends = edges(affordable(subject, newest, 2) - 5)
        for end in (*ends, *reversed(ends), *(end + newest for end in ends[-1:])):  # the last length makes tokens migrate
            if end > at:
                append(cache, 0, range(at, end), written)
            if end in ends:
                append(cache, 1, range(max(at, end), max(at, end) + 5), written)
                cache.truncate(end)
            first = max(0, end - config["max_tokens"])
            given = pair_of_content(0, 0, range(first, end), written.heads, written.dim)
            wanted: tuple[Reads, Reads] = (settled(given[0], policy), settled(given[1], policy))
            belongs(cache.read(), 0, 0, range(first, end), written, subject.level == "exact", wanted)
            at = end


def append(cache: Handle, stream: int, positions: range, written: Written) -> None:
    cache.append(*pair_of_content(stream, 0, positions, written.heads, written.dim))
    written.up_to(stream, 0, positions.stop)
