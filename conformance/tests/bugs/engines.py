"""Bugs in the engine."""

import numpy as np

from bugs.plant import bug, in_source
from kvref.engine import Engine
from kvref.errors import OutOfBlocks


def rows_of(engine, session):
    """The cached keys and values of a session, by layer."""
    layers = range(engine.canary.num_layers)
    return [tuple(map(np.array, engine.cache.gather(engine._sequence[session], layer))) for layer in layers]


def put(engine, session, rows, start, stop):
    """Overwrite a range of a session's rows with these rows."""
    for layer, pair in enumerate(rows):
        engine.cache.write(engine._sequence[session], layer, start, *(each[start:stop] for each in pair))


@bug("ENG-01")
def positions_wrap_at_64(patch):
    in_source(
        patch,
        "kvref.engine.Model._turned",
        "part[start :",
        "part[start % 64 :",
        "start + len(heads)]",
        "start % 64 + len(heads)]",
    )


@bug("ENG-02")
def a_batch_is_answered_in_the_order_of_its_sessions(patch):
    in_source(patch, "kvref.engine.Engine.step", "list(said.values())", "[said[each] for each in sorted(said)]")


@bug("ENG-03")
def later_pieces_are_turned_one_position_too_far(patch):
    late = "start + (start > 0 and len(tokens) > 1)"
    in_source(
        patch, "kvref.engine.Model.step", "self._turned(query, start), self._turned(key, start)",
        f"self._turned(query, {late}), self._turned(key, {late})",
    )  # fmt: skip


@bug("ENG-04")
def a_prefix_is_one_token_longer_than_its_block(patch):
    extend, seen = Engine.extend, {}

    def hit(self, session, tokens):
        first = self.length(session) == 0 and len(tokens) > 17
        extend(self, session, tokens[:17] if first else tokens)
        if first:
            rows = seen.setdefault((id(self), tuple(tokens[:16])), rows_of(self, session))
            put(self, session, rows, 0, 17)
            extend(self, session, tokens[17:])

    patch.setattr(Engine, "extend", hit)


@bug("ENG-04")
def a_block_that_is_not_full_is_given_to_one_alone(patch):
    """The next session that begins with the tokens of an ended one, while the first exists, reads zeros at its end."""
    close, extend = Engine.close, Engine.extend

    def closing(self, session):
        self.gone = getattr(self, "gone", {})
        self.gone.setdefault(tuple(self._tokens[session]), None)
        close(self, session)

    def extending(self, session, tokens):
        begun = [ended for ended in getattr(self, "gone", ()) if ended == tuple(tokens[: len(ended)]) and len(ended) % 16]
        if begun and self.length(session) == 0:
            ended = max(begun, key=len)
            extend(self, session, ended)
            if self.gone[ended] in self._tokens:
                blank = [tuple(map(np.zeros_like, pair)) for pair in rows_of(self, session)]
                put(self, session, blank, len(ended) // 16 * 16, len(ended))
            self.gone[ended] = session
            tokens = tokens[len(ended) :]
        extend(self, session, tokens)

    patch.setattr(Engine, "close", closing)
    patch.setattr(Engine, "extend", extending)


@bug("ENG-05")
def a_step_lands_in_a_block_that_was_given_away(patch):
    close, extend = Engine.close, Engine.extend

    def closing(self, session):
        self.late = rows_of(self, session)
        close(self, session)

    def extending(self, session, tokens):
        extend(self, session, tokens)
        if len(tokens) > 16 and getattr(self, "late", None):
            put(self, session, self.late, 10, 16)
            self.late = None

    patch.setattr(Engine, "close", closing)
    patch.setattr(Engine, "extend", extending)


@bug("ENG-06")
def a_token_without_a_block_is_dropped(patch):
    extend = Engine.extend

    def dropping(self, session, tokens):
        try:
            extend(self, session, tokens)
        except OutOfBlocks:
            self._tokens[session] += tokens
            self._next[session] = tokens[-1]

    patch.setattr(Engine, "extend", dropping)
    patch.setattr(Engine, "generate", Engine.generate)
    in_source(
        patch, "kvref.engine.Engine.generate", "self.cache.ensure_capacity(self._sequence[session], len(told) + count)", "pass"
    )


@bug("ENG-07")
def a_prefix_is_known_by_its_length_and_its_last_block(patch):
    extend, seen = Engine.extend, {}

    def hit(self, session, tokens):
        first = self.length(session) == 0
        extend(self, session, tokens)
        if first:
            rows = seen.setdefault((id(self), len(tokens), tuple(tokens[-1:])), rows_of(self, session))
            put(self, session, rows, 0, len(tokens))

    patch.setattr(Engine, "extend", hit)


@bug("ENG-08")
def a_fork_writes_into_its_parents_blocks(patch):
    fork = Engine.fork

    def sharing(self, session):
        child = fork(self, session)
        self.cache.drop(self._sequence[child])
        self._sequence[child] = self._sequence[session]
        return child

    patch.setattr(Engine, "fork", sharing)


@bug("ENG-08")
def a_second_answer_goes_on_from_the_first(patch):
    in_source(
        patch, "kvref.engine.Engine.sample", "child = self.fork(session)", "child = child if said else self.fork(session)",
        "self.close(child)", "None",
    )  # fmt: skip


@bug("ENG-05")
def what_is_cut_off_was_said(patch):
    in_source(patch, "kvref.engine.Engine.cancel", "self.sample(session, 1, count)", "self.generate(session, count)")


@bug("ENG-10")
def what_is_saved_are_its_blocks(patch):
    """Rows of a session that was written since are loaded instead of the saved ones."""
    load = Engine.load

    def loading(self, saved):
        session = load(self, saved)
        late = [rows_of(self, other) for other in self._tokens if other != session and self.length(other) >= 32]
        if self.length(session) >= 32 and late:
            put(self, session, late[-1], 16, 32)
        return session

    patch.setattr(Engine, "load", loading)


@bug("ENG-10")
def what_comes_next_is_not_saved(patch):
    in_source(patch, "kvref.engine.Engine.load", "self._next[session] = kept.next", "self._next[session] = kept.tokens[-1]")


@bug("ENG-09")
def truncating_leaves_what_was_written(patch):
    in_source(patch, "kvref.engine.Engine.truncate", "self._truncate(session, length)", "del told[length:]")


@bug("ENG-10")
def removing_takes_one_token_too_many(patch):
    in_source(patch, "kvref.engine.Engine.remove", "told[stop:]", "told[stop + 1 :]")


@bug("ENG-11")
def it_speaks_up_to_the_end_and_then_fails(patch):
    in_source(patch, "kvref.engine.Engine._speaks", ", self.canary.context - len(told))", ")", "min(", "(")


@bug("ENG-11")
def a_step_skips_sessions_whose_context_is_full(patch):
    step = Engine.step

    def shorter(self, sessions):
        return step(self, [session for session in sessions if self.length(session) < self.canary.context])

    patch.setattr(Engine, "step", shorter)


@bug("ENG-12")
def what_comes_next_is_kept_by_three_rows(patch):
    in_source(patch, "kvref.engine.Engine.extend", "self._next[session]", "self._next[session % 3]")
    in_source(patch, "kvref.engine.Engine.generate", "self._next[session]", "self._next[session % 3]")
    patch.setattr(
        Engine, "close", lambda self, session: [self.cache.drop(self._sequence.pop(session)), self._tokens.pop(session)]
    )


@bug("ENG-13")
def a_window_is_one_too_wide(patch):
    in_source(patch, "kvref.engine.Model._attended", "self.canary.windows[layer]", "(self.canary.windows[layer] or 10**6) + 1")


@bug("ENG-13")
def a_window_is_one_too_narrow(patch):
    in_source(patch, "kvref.engine.Model._attended", "self.canary.windows[layer]", "(self.canary.windows[layer] or 10**6) - 1")


@bug("LAW-11")
def a_negative_token_counts_from_the_end(patch):
    in_source(patch, "kvref.engine.Engine.extend", 'in_range(token, self.canary.vocabulary, TokenOutOfRange, "token")', "token")
