"""Whole engines, judged by what they say: what lies behind a wrong token."""
