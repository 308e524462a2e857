"""The answers, with their reasons."""

answers = {
    1: [4, 5, 6],  # the window counts the query's own token
    2: [0, 1],  # nothing is before the first token
    3: 8,
    4: [0, 1, 2, 8, 9],  # the sink tokens are in addition to the window
    5: [0, 1, 2, 3],  # position 2 is a sink token and in the window
    6: [8, 9, 10, 11],  # the last query of a chunk
    7: [12],  # the first query of the next one
    8: 100,  # evicted tokens count
    9: False,  # the query at 90 sees 87 to 89, which are overwritten
    10: True,  # two drafts can be removed: the query at 98 sees 95 to 97
}
