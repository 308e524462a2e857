"""Checks of LAW-18: rows and scales of the quantized cache at high positions of each layer."""

from kvref_conformance.checking.content import Written, belongs, pair_of_content
from kvref_conformance.checking.real import affordable, edges
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.rows import read_as


@check("LAW-18", "quantized")
def layers_of_different_length_keep_their_scales(subject: Subject) -> None:
    for format in subject.formats("int8", "float8_e4m3fn", "float8_e5m2"):
        cache = new(subject, "quantized", num_layers=4, capacity=700, num_kv_heads=3, head_dim=96, format=format)
        written = Written(cache.config["num_kv_heads"], cache.config["head_dim"])
        lengths = [0] * cache.config["num_layers"]
        room = affordable(subject, cache.config["capacity"], 3 * len(lengths))
        for count in (1, 15, 1, 47, 64, 129, 400):
            for layer in range(len(lengths)):
                more = min(count // (layer + 1), room - lengths[layer])
                if not more:
                    continue
                given = pair_of_content(0, layer, range(lengths[layer], lengths[layer] + more), written.heads, written.dim)
                cache.append(layer, *given)
                lengths[layer] += more
                written.up_to(0, layer, lengths[layer])
        for layer, length in enumerate(lengths):
            every = sorted({p for p in (0, 16, 17, 64, 127, 128, 255, 256, 257, length - 1) if 0 <= p < length})
            given = pair_of_content(0, layer, every, written.heads, written.dim)
            wanted = read_as(given[0], format), read_as(given[1], format)
            belongs(cache.read_tokens(layer, every), 0, layer, every, written, subject.level == "exact", wanted)


@check("LAW-18", "quantized")
def drafts_come_and_go_at_any_length(subject: Subject) -> None:
    for format in subject.formats("int8", "float8_e4m3fn", "float8_e5m2"):
        cache = new(subject, "quantized", num_layers=3, capacity=600, num_kv_heads=3, head_dim=96, format=format)
        written, layers, at = Written(cache.config["num_kv_heads"], cache.config["head_dim"]), cache.config["num_layers"], 0
        ends = edges(affordable(subject, cache.config["capacity"], 2 * layers) - 5)
        for end in (*ends, *reversed(ends)):
            for layer in range(layers if end > at else 0):
                for stream, positions in ((0, range(at, end)), (1, range(end, end + 5))):
                    cache.append(layer, *pair_of_content(stream, layer, positions, written.heads, written.dim))
                    written.up_to(stream, layer, positions.stop)
            cache.truncate(end)
            for layer in range(layers):
                every = sorted({0, end // 2, max(0, end - 2), end - 1})
                given = pair_of_content(0, layer, every, written.heads, written.dim)
                wanted = read_as(given[0], format), read_as(given[1], format)
                belongs(cache.read_tokens(layer, every), 0, layer, every, written, subject.level == "exact", wanted)
            at = end
