"""The answers, with their reasons."""

answers = {
    1: 6,  # two blocks in each of two layers
    2: 6,  # an export is one more owner of the same blocks
    3: 4,  # the last block of each layer is shared, and copied
    4: 6,  # the copies are free; the export holds the four old blocks
    5: 4,  # three blocks of two tokens in each layer, before anything arrives
    6: "TransferIncomplete",  # the first layer is missing
    7: "AlreadyArrived",  # a row arrives once
    8: 0,  # two blocks per layer; the abort frees none, because the write can still take effect
    9: "OutOfBlocks",
    10: 4,  # no write is in flight any more
}
