"""The answers, each with its computation."""

answers = {
    1: 2 * 32 * 8 * 128 * 2,
    2: 131072 * 32768 / 2**30,
    3: 8,  # twice the bytes per number
    4: 16,  # four times the heads
    5: 5,  # 20 / 4
    6: 2 * 8 * (128 + 4),
    7: (512 + 64) * 2,
    8: 512,  # 2048 / 4
}
