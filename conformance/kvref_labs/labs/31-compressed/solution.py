"""The answers, with their reasons."""

answers = {
    1: [10, 20],  # the group is incomplete
    2: [20],  # the mean of 10, 20 and 30
    3: [40],  # the first token of the second group
    4: [3, 4],  # the tokens that the next query sees beside its own
    5: [8.0, 17.0],  # 3, 4, 5 and the row 20; then 4, 5, 6, and the rows 20 and 50
    6: [20],  # the second group is incomplete again
    7: [40, 50],  # its remaining tokens are in the state
    8: "NotTruncatable",  # token 0 is in the first row only
    9: "OutOfBlocks",  # the sequence still has the only block
    10: [],  # no row of the former owner
    11: [20, 60],  # the mean of 40, 50 and 90
}
