"""The answers, with their reasons."""

answers = {
    1: [0, 1],
    2: [2, 3, 4],  # a later call continues the numbers
    3: [2, 2, 3, 3, 3],  # siblings have the same position
    4: [1, 3],  # node 3 has the value 6; its parent is node 1
    5: 2,  # drafts are not committed
    6: 0,  # two tokens and five nodes fill four blocks of two
    7: 3.25,  # the values 1, 2, 3 and 7
    8: "InUse",  # the tree is open
    9: [1, 2, 4, 6],
    10: 2,
    11: [0],  # a new tree
}
