"""The answers, with their reasons."""

answers = {
    1: [1, 2, 6],  # the first row of the call is row 1
    2: "SourceNotWritten",  # row 2 has no source yet
    3: [3.0],  # the mean of 1, 2 and 6
    4: [0.0],  # a source of 0 entries is written, and nothing is seen
    5: [1, 2, 6],  # `trim` removes tokens only
    6: [0, 1, 2],  # entries of a source are no tokens
    7: "SourceAlreadyWritten",
    8: [0, 3, 3],  # the former rows 2, 1 and 1
    9: [5],  # nothing of the former source follows
    10: [2, 0, 1],  # `clear` removed the tokens of row 1, and not those of its copy
}
