"""Random call sequences: the state machines of the families under Hypothesis, and the long campaigns of `kvref search`.

The oracle's model judges each reply.
"""


# `kvref search`: runs state machines, checks and short soaks of one implementation in many processes, for a given time.
