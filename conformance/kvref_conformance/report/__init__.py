"""The output of a run: text for a terminal, a progress bar, JSON, HTML pages, and scripts."""
