"""Checks of LAW-01, LAW-16 and LAW-20 for this family."""

from collections.abc import Iterator

from kvref_conformance.checking.expect import raises, same
from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new, tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.latent.checks import filled, given, holds, plain
from kvref_conformance.families.latent.known import of_cache


@check("LAW-01", "latent")
def tokens_that_do_not_fit_leave_no_trace(subject: Subject) -> None:
    cache, pair = filled(subject, 2, **plain(subject) | {"max_tokens": 4})
    count = cache.config["max_tokens"] - 1
    with raises("CapacityExceeded"):  # one token less would fit
        cache.append(*(tokens(subject, count, 1, cache.config[name])[:, 0] for name in ("rank", "rope_dim")))
    holds(subject, cache, pair, "after an append of one token more than fits raised CapacityExceeded")


@check("LAW-16", "latent")
def attending_leaves_its_inputs_alone(subject: Subject) -> None:
    subject.in_this_process()
    cache, _ = filled(subject, 3, **plain(subject))
    heads = of_cache(subject, cache)
    inputs = {"query": heads.query(subject, 2), "up_keys": heads.up_keys, "up_values": heads.up_values}
    own = {name: subject.own(rows) for name, rows in inputs.items()}
    cache.attend(*own.values(), heads.scale, True)
    for name, rows in inputs.items():
        same(subject.numpy(own[name].array), rows, f"the input {name}, after attention")


@check("LAW-20", "latent")
def bytes_are_counted_whatever_the_sizes_are_given_in(subject: Subject) -> None:
    cache = new(subject, "latent", **plain(subject), max_tokens=100)
    latent, rope = given(subject, cache, min(100, cache.config["max_tokens"]))

    def script(typed: Typed) -> Iterator[Seen]:
        typed_cache = typed.new("latent", **plain(subject), max_tokens=100)
        typed_cache.append(latent, rope)
        yield f"length and num_bytes of {len(latent)} rows", (typed_cache.length, typed_cache.num_bytes)

    the_same_in_any_type(subject, script)


@check("LAW-20", "latent")
def tokens_go_whatever_the_length_is_given_in(subject: Subject) -> None:
    cache = new(subject, "latent", **plain(subject), max_tokens=200)
    latent, rope = given(subject, cache, 170)

    def script(typed: Typed) -> Iterator[Seen]:
        shrinking = typed.new("latent", **plain(subject), max_tokens=200)
        shrinking.append(latent[:110], rope[:110])
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(shrinking, "truncate", 100)
            shrinking.append(latent[110:], rope[110:])
            yield f"length after an append of 60, call {time + 1}", shrinking.length
        yield "the rows after truncate and append", shrinking.read()

    the_same_in_any_type(subject, script)
