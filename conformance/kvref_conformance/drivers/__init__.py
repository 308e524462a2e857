"""Connections to implementations in other processes, and limits of time and memory."""
