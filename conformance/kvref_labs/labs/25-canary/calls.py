"""A canary in an engine. The word w is the token FIRST_WORD + w."""

from kvref.canary import BOS, FIRST_WORD, Canary
from kvref.engine import Engine
from kvref_labs.quiz import ask

# The first layer attends 2 tokens back, and the second 3.
canary = Canary(offsets=(2, 3))
ask(1, canary.period)


def begin(engine, words):
    session = engine.open()
    engine.extend(session, [BOS, *(FIRST_WORD + word for word in words)])
    return session


def generate(engine, session, count):
    return [token - FIRST_WORD for token in engine.generate(session, count)]


engine = Engine(canary)
mine = begin(engine, [10, 11, 12, 13, 14, 15])
ask(2, generate(engine, mine, 3))
ask(3, generate(engine, mine, 4))

# Two sessions.
engine = Engine(canary)
mine, theirs = begin(engine, [10, 11, 12, 13, 14, 15]), begin(engine, [30, 31, 32, 33, 34, 35])
ask(4, generate(engine, theirs, 2))

# The same, but after the prompts the cache of the second session is copied over that of the first, in both layers. The prompts
# are computed already, so the first generated word depends on what the layers read before the copy, and the next words on what
# they read after it.
engine = Engine(canary)
mine, theirs = begin(engine, [10, 11, 12, 13, 14, 15]), begin(engine, [30, 31, 32, 33, 34, 35])
for layer in (0, 1):
    engine.cache.write(0, layer, 0, *engine.cache.gather(1, layer))
ask(5, generate(engine, mine, 4))

# int8 rounds keys and values. Must a canary with these offsets generate the same tokens?
ask(6, canary.survives("int8"))
