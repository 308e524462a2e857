"""Hypothesis draws the same examples every time: CI must not find on Tuesday what it missed on Monday."""

from hypothesis import settings

pytest_plugins = ["pytester", "browser", "commandline"]

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")
