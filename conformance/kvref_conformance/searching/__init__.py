"""One Hypothesis state machine a family: calls nobody thought of, each reply judged by the oracle's model of the object."""
