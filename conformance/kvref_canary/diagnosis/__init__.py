"""Whole engines, judged by the tokens they generate: diagnosis of what caused a wrong token."""
