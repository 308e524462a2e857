"""The answers, with their reasons."""

answers = {
    1: ["a", "b"],
    2: [6, 2],  # six tokens of a's prompt, and the first two of b's
    3: [7, 7, 2],  # one generated token of a, the rest of b's prompt, and two tokens of c's
    4: 1,  # two blocks of a, two of b, one of c
    5: [8, 8, 8],  # one token of a and b each, and six of c
    6: 0,
    7: ["a", "b"],  # the pool is empty when a needs a third block: the newest request, c, is preempted
    8: 1,
    9: 6,  # all requests have finished
}
