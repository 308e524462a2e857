"""What comes out of a run: text for a terminal, a live line while it runs, JSON."""
