"""Calls to an implementation, their replies, and the proxies through which checks make them."""
