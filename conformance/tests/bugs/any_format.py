"""Bugs where a cache meets a format: codes without their scales, twice quantized, or not at all."""

from bugs.plant import bug, in_source
from kvref.formats import Quantized
from kvref.slots import SlotStore
from kvref.windowed import WindowedCache

STEP = "kvref.windowed.WindowedCache.step"
WRITE = "kvref.windowed.WindowedCache._write"


def only_codes_are_put(patch, cache, operation, when):
    """In an operation of the cache codes are put into slots, and scales stay as they are whenever `when` says so of the cache."""
    put, work = SlotStore.put, getattr(cache, operation)
    going: list[object] = []

    def working(self, *args, **kwargs):
        going.append(self)
        try:
            return work(self, *args, **kwargs)
        finally:
            going.pop()

    def codes_only(self, slots, new):
        before = [None if scale is None else scale.copy() for scale in self._stored[1:]]
        put(self, slots, new)
        if going and when(going[-1]):
            self._stored = Quantized(self._stored.codes, *before)

    patch.setattr(cache, operation, working)
    patch.setattr(SlotStore, "put", codes_only)


@bug("WIN-10")
def a_ring_that_turned_over_keeps_its_scales(patch):
    only_codes_are_put(patch, WindowedCache, "append", lambda cache: cache.length > cache.config.window)


@bug("WIN-10")
def the_scale_of_a_draft_stays(patch):
    truncate = WindowedCache.truncate

    def remembering(self, length):
        self.went = self.length > length > 0
        truncate(self, length)

    patch.setattr(WindowedCache, "truncate", remembering)
    patch.setattr(WindowedCache, "went", False, raising=False)
    only_codes_are_put(patch, WindowedCache, "append", lambda cache: cache.went)


@bug("WIN-10")
def sinks_are_read_with_the_scales_of_the_ring(patch):
    in_source(
        patch, "kvref.windowed.WindowedCache.read", "return self._store.read(self._slots(wanted))",
        """sinks = self.config.sinks
    own, turned = self._slots(wanted), self._slots(wanted + sinks * (wanted < sinks))
    return tuple(
        store.dequantized(type(codes)(codes.codes, *scales[1:]))
        for store in (self._store.keys, self._store.values)
        for codes, scales in [(store.stored(own), store.stored(turned))]
    )""",
    )  # fmt: skip


@bug("WIN-10")
def a_step_attends_over_what_was_given(patch):
    in_source(patch, STEP, "self._store.dequantized(stored)", "(keys, values)")


@bug("WIN-10")
def a_step_quantizes_what_it_has_read_back(patch):
    in_source(patch, STEP, "self._write(stored,", "self._write(self._store.quantized(*coming),")


@bug("WIN-10")
def a_step_that_is_refused_counts_its_tokens(patch):
    in_source(
        patch, STEP, "stored = self._store.quantized(keys, values)",
        "self.length += keys.shape[0]\n    stored = self._store.quantized(keys, values)\n    self.length -= keys.shape[0]",
    )  # fmt: skip


@bug("WIN-10")
def keys_have_the_scales_of_values(patch):
    in_source(
        patch, WRITE, "self._store.put(slots, stored)",
        "self._store.put(slots, (type(stored[0])(stored[0].codes, *stored[1][1:]), stored[1]))",
    )  # fmt: skip
