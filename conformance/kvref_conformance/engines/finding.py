"""What a diagnosis says: the facts, and the sentence made of them."""

from dataclasses import dataclass

BLOCKS = (256, 128, 64, 32, 16, 8)
KINDS = {
    "another": "{request} read {there} of {other} instead of its own {here}",
    "earlier occupant": "{request} read {there} of an earlier occupant, {other}, instead of its own {here}",
    "own": "{request} read its own {there} instead of {here}: shifted by {shift}",
    "swapped": "{here} of {request} hold one another's tokens, block by block of {shift}",
    "zeros": "{request} read zeros at {here}",
    "unreadable": "{request} found no key of {here}: zeros, lost, or keys of elsewhere",
    "turned": "keys of {here} of {request} were turned {far} too {sense}",
    "layer": "{request} read what layer {shift} holds at {here}",
    "head": "{request} read what kv head {shift} holds at {here}",
    "heads": "{request} read in each kv head what the head {shift} further on holds at {here}",
    "window": "{request} saw a window of {shift}{more} where {due} was due",
    "dropped": "{request} lost {here}, and what came behind moved up",
    "twice": "{request} holds {here} twice, and what came behind moved back",
    "left over": "{here} of {other} stayed in front of what {request} wrote there",
}


@dataclass(frozen=True)
class Finding:
    """What was read instead of what should have been. request, other: by their names, such as "request 7".

    kind: "another" (what another request holds), "earlier occupant" (the same, of one that had ended), "own" (what this one holds
    elsewhere), "swapped" (blocks of its own), "zeros", "unreadable" (keys that no query finds), "turned" (keys), "layer", "head",
    "heads" (moved on), "window", "dropped", "twice", "left over" (tokens), "several" (see candidates), or "unknown" (see clue).

    layers, heads: those that show it; none where all do. hidden: other layers may have it too, for there nothing read it.
    start, stop: the positions, as far as wrong ones were read; `open` where nothing says that they end there. within: the block
    around them, which may be wrong as a whole. part: "keys and values", "values", "keys". shift: how much further on lies what
    was read, or by how much a key was turned too far, the number of the layer or head that was read, the tokens of the window
    or more, or of the blocks swapped. due: the window that is right. after: an event at which the positions or the damage begin
    or end.
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
    candidates: tuple["Finding", ...] = ()

    @property
    def block(self) -> int | None:
        """The largest size of which the positions, or what is around them, are whole blocks."""
        start, stop = self.within or (self.start, self.stop)
        whole = [size for size in BLOCKS if start % size == stop % size == 0]
        return whole[0] if whole and stop > start and not self.open else None

    def __str__(self) -> str:
        if self.kind == "unknown":
            return f"{self.request}: not known. {self.clue}"
        if self.kind == "several":
            return "either " + "; or ".join(map(str, self.candidates))
        here, there = (self._positions(shift) for shift in (0, self.shift))
        far = "one position" if abs(self.shift) == 1 else f"{abs(self.shift)} positions"
        facts = {"here": here, "there": there, "far": far, "sense": "far" if self.shift > 0 else "little"}
        facts["more"] = " or more" if self.shift > self.due else ""
        return KINDS[self.kind].format(**vars(self) | facts) + self._where()

    def _positions(self, shift: int) -> str:
        first, last = self.start + shift, self.stop + shift - 1
        if self.open:
            text = f"positions {first}..{last} and perhaps on"
        else:
            text = f"position {first}" if first == last else f"positions {first}..{last}"
        if self.block is None:
            return text
        start, stop = self.within or (self.start, self.stop)
        if (start, stop) != (self.start, self.stop):
            return f"{text} (in the block {start + shift}..{stop + shift - 1})"
        return f"{text} (a block of {self.block})" if self.block == stop - start else f"{text} (blocks of {self.block})"

    def _where(self) -> str:
        if self.kind in ("dropped", "twice", "left over"):
            text = ""
        elif self.layers:
            text = ", layer " + " and ".join(map(str, self.layers)) + (" at least" if self.hidden else "")
        else:
            text = ", in every layer"
        if self.heads:
            text += ", kv head " + " and ".join(map(str, self.heads))
        if self.part == "values":
            text += ", the values alone"
        return text + (f", after {self.after}" if self.after else "")
