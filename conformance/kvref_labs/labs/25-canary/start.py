"""Your answers: a number, lists of words, and in question 6 True or False."""

answers = {
    1: None,
    2: None,
    3: None,
    4: None,
    5: None,
    6: None,
}
