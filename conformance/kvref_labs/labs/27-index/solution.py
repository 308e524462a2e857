"""The answers, with their reasons."""

answers = {
    1: [1, 3, 4],  # the scores 9, 7 and 6, in the order of their positions
    2: [0, 1, -1],  # the query at position 1 sees two tokens
    3: [0, 1, 3],  # of 4, 9, 1 and 7: the token at position 4 is later
    4: [0, 2, 4],  # -4, -1 and -6 are the largest scores
    5: 73,  # the mean of 90, 70 and 60, because all scores of attention are 0
    6: [1, 3, 4],  # of 4, 9, 1, 7, 8 and 2
    7: [1, 3, 4],  # the fork has a copy of the last block
    8: [1, 3, 4],  # as question 6: the copy has its index keys
    9: [0, 1, -1],
}
