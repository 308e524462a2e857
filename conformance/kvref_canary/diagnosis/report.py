"""The result of a diagnosis: the facts, and a sentence that states them."""

from dataclasses import dataclass

BLOCK_SIZES = (256, 128, 64, 32, 16, 8)
SENTENCES = {
    "another": "{request} read {there} of {other} instead of its own {here}",
    "earlier occupant": "{request} read {there} of {other}, which had ended, instead of its own {here}",
    "stale": "values at {here} of {request} are stale: they were computed for {other}, at {there}",
    "own": "{request} read its own {there} instead of {here}: shifted by {shift}",
    "swapped": "{request} read {here} with two neighboring blocks of {shift} tokens swapped",
    "zeros": "{request} read zeros at {here}",
    "unreadable": "no query of {request} matched a key at {here}: keys of zeros, lost keys, or keys of other positions",
    "turned": "keys of {here} of {request} were rotated {far} too {sense}",
    "layer": "{request} read the entries of layer {shift} at {here}",
    "head": "{request} read the entries of kv head {shift} at {here}",
    "heads": "each kv head of {request} read the entries of the kv head {shift} after it at {here}",
    "window": "{request} attended to a window of {shift}{more} tokens instead of {due}",
    "dropped": "{request} lost {here}, and all later tokens moved to earlier positions",
    "twice": "{request} contains {here} twice, and all later tokens moved to later positions",
    "left over": "{request} wrote its tokens after stale ones: {here} of {other}",
    "impossible": "{shift} of {due} wrong tokens of {request} were not read from a cache: no entries make them the likeliest, "
    "and a right token follows. The logits were changed after attention, or the sampler chose another token than the likeliest",
    "inverted": "{shift} of {due} wrong tokens of {request} have the lowest logit of all tokens if the right entries were read: "
    "the sign of the logits was inverted after attention",
    "nan": "{request} generated only the first token of the vocabulary, {shift} times, from {here} on: the logits were NaN, "
    "because of the cache or of a later operation",
}
NOT_READ = ("impossible", "inverted", "nan")  # kinds without a place in the cache


@dataclass(frozen=True)
class Diagnosis:
    """What the engine read instead of the right entries. request, other: names of requests, such as "request 7".

    kind: "another" (entries of another request), "earlier occupant" (entries of a request that had ended), "stale" (values
    of this request that were computed before tokens were removed), "own" (entries of this request at other positions), "swapped"
    (its own blocks), "zeros", "unreadable" (keys that match no query), "turned" (wrongly rotated keys), "layer", "head", "heads"
    (exchanged cyclically), "window", "dropped", "twice", "left over" (tokens), "impossible" (tokens that no entries make the
    likeliest), "inverted" (tokens with the lowest logit), "nan" (NaN logits), "several" (see candidates), or "unknown" (see
    clue).

    layers, heads: those that show the damage; empty if all do. hidden: other layers may be damaged too, but no query shows it.
    start, stop: the positions [start, stop), as far as wrong ones were read. open: the damage may extend past stop. within: the
    block around them, which may be wrong as a whole. part: "keys and values", "values", "keys". shift, depending on the kind: the
    distance to the entries that were read, the excess rotation of a key in positions, the index of the layer or head that was
    read, the tokens of the window or the excess tokens, the tokens of a swapped block, or the number of tokens that were not
    read. due: the right window, or the number of wrong tokens. after: an event at which the positions or the damage begin or end.
    """

    kind: str
    request: str
    layers: tuple[int, ...] = ()
    hidden: bool = False
    heads: tuple[int, ...] = ()
    start: int = 0
    stop: int = 0
    open: bool = False
    part: str = "keys and values"
    other: str | None = None
    shift: int = 0
    due: int = 0
    after: str | None = None
    within: tuple[int, int] | None = None
    clue: str = ""
    candidates: tuple["Diagnosis", ...] = ()

    @property
    def block(self) -> int | None:
        """The largest block size for which the positions, or the block around them, are whole blocks."""
        start, stop = self.within or (self.start, self.stop)
        whole = [size for size in BLOCK_SIZES if start % size == stop % size == 0]
        return whole[0] if whole and stop > start and not self.open else None

    def __str__(self) -> str:
        if self.kind == "unknown":
            return f"{self.request}: cause unknown. {self.clue}"
        if self.kind == "several":
            return "either " + "; or ".join(map(str, self.candidates))
        here, there = (self._positions(shift) for shift in (0, self.shift))
        far = "one position" if abs(self.shift) == 1 else f"{abs(self.shift)} positions"
        facts = {"here": here, "there": there, "far": far, "sense": "far" if self.shift > 0 else "little"}
        facts["more"] = " or more" if self.shift > self.due else ""
        return SENTENCES[self.kind].format(**vars(self) | facts) + self._where()

    def _positions(self, shift: int) -> str:
        first, last = self.start + shift, self.stop + shift - 1
        if self.open:
            text = f"positions {first} to {last}, perhaps later ones"
        else:
            text = f"position {first}" if first == last else f"positions {first} to {last}"
        if self.block is None:
            return text
        start, stop = self.within or (self.start, self.stop)
        if (start, stop) != (self.start, self.stop):
            return f"{text} (in the block of positions {start + shift} to {stop + shift - 1})"
        return f"{text} (a block of {self.block})" if self.block == stop - start else f"{text} (blocks of {self.block})"

    def _where(self) -> str:
        if self.kind in ("dropped", "twice", "left over", *NOT_READ):
            text = ""
        elif self.layers:
            text = ", in layer " + " and ".join(map(str, self.layers)) + (" at least" if self.hidden else "")
        else:
            text = ", in every layer"
        if self.heads:
            text += ", in kv head " + " and ".join(map(str, self.heads))
        if self.part == "values" and self.kind != "stale":
            text += ", values only"
        return text + (f", after {self.after}" if self.after else "")
