"""LAW-18: hundreds of blocks of production sizes."""

from kvref_conformance.checking.content import pair_of_content
from kvref_conformance.checking.expect import pair
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject


@check("LAW-18", "hosted")
def hundreds_of_blocks_go_to_the_host_and_back(subject: Subject) -> None:
    store = new(subject, "hosted", num_blocks=150, block_size=16, head_dim=64, capacity=300)
    blocks, places, size, heads, dim = (
        store.config[name] for name in ("num_blocks", "capacity", "block_size", "num_kv_heads", "head_dim")
    )
    rounds = max(1, places // max(blocks, 1))
    order = subject.rng.permutation(places).tolist()
    for turn in range(rounds):
        for block in range(blocks):
            store.write(block, *pair_of_content(turn * blocks + block, 0, range(size), heads, dim))
        store.to_host(list(range(blocks)), order[turn * blocks : (turn + 1) * blocks])
    for turn in range(rounds):
        store.to_device(order[turn * blocks : (turn + 1) * blocks], list(range(blocks)))
        for block in range(blocks):
            number = turn * blocks + block
            pair(store.read(block), pair_of_content(number, 0, range(size), heads, dim), f"block {number}")
