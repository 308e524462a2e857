"""Bugs in the family `recurrent`."""

from bugs.plant import bug, in_source


@bug("RECURRENT-01")
def append_puts_tokens_first(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache.append", "[self._keys, keys]", "[keys, self._keys]")


@bug("RECURRENT-02")
def one_token_too_many_is_accepted(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache.append", "if total > self", "if total - 1 > self")


@bug("RECURRENT-03")
def clear_keeps_the_keys(patch):
    in_source(patch, "kvref.recurrent.RecurrentCache.clear", "self._keys = self", "self")
