"""The answers, with their reasons."""

answers = {
    1: 12,  # a new sequence has no blocks
    2: 2,  # five tokens in blocks of four
    3: 8,  # two blocks in each of two layers
    4: 8,  # eight tokens fit into the two blocks
    5: [8, 5],  # lengths count tokens, per layer
    6: 6,  # one more block in each layer
    7: 6,  # a fork copies nothing
    8: 5,  # the last block of layer 0 is shared, so it is copied before the write
    9: 6,  # five blocks are shared with the child and stay; only the last block of layer 0 is a's alone
    10: 0.0,  # all blocks are free
}
