"""Engines that other people wrote, each judged by what a canary says in it."""
