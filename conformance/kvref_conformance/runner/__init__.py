"""Running checks, and the verdicts that follow."""
