"""State machines, one per family: Hypothesis generates random call sequences, and the oracle's model judges each reply."""


# `kvref search`: runs state machines, checks and short soaks of one implementation in many processes, for a given time.
