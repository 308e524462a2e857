"""The answers, with their reasons."""

answers = {
    1: 2,  # five tokens in blocks of two: three of five blocks
    2: 4,  # the third block is not full
    3: 2,  # never the whole prompt, and only full blocks
    4: 2,  # the second block has another token
    5: 0,  # the keys form a chain: the second block is not found without the first
    6: 0,  # another salt
    7: 1,  # two blocks are shared with a, and one is new
    8: 5,  # cached blocks that no sequence lists count as free
    9: 4,  # the two blocks that are not cached, and the last block of b
    10: 2,  # the second block of the prompt, because the last blocks are evicted first
}
