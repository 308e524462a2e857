"""State machines, one per family: Hypothesis generates random call sequences, and the oracle's model judges each reply."""
