"""The answers, with their reasons."""

answers = {
    1: [1, 2, 3],  # padding does not count
    2: [1, 7],  # with `left`, the last column is the token
    3: [4, 5, 6],  # a row that gets no tokens stays as it is
    4: [2, 4, 3],
    5: [1.0, 4.0],  # the first query sees 1, the second the mean of 1 and 7
    6: [1, 7],  # the former row 0
    7: [3, 2, 2, 1],  # new rows follow the present ones
    8: [2, 2, 0, 1],
    9: "CapacityExceeded",  # the last row would have six tokens
    10: [2, 2, 0, 1],  # a call that raises changes nothing
}
