// The windowed cache: the effect of calls on its ring, according to the specification, and the picture of the ring. A slot shows
// the position of the token that it contains.
"use strict";

(() => {
  const { FAMILIES, PICTURES, box, cell, element, hue, keep, kept, listed, many, mark, range, row, span, tokens } = window.kvref;
  const SEEN = 0, SPARE = 1, SINK = 2; // hues of tokens: visible to the next query; stored only for truncation; sink tokens

  const ringOf = ({ window, rollback }) => window + rollback;
  const slotOf = ({ config }, position) =>
    position < config.sinks ? position : config.sinks + ((position - config.sinks) % ringOf(config));

  function firstSeen({ window, chunk }, query) { // the first position after the sinks that a query sees (WIN-01, WIN-07)
    return Math.max(query - window + 1, chunk ? query - (query % chunk) : 0);
  }

  // Ranges [start, stop) of stored positions: the sinks, and the positions >= from in the ring; one range if they are adjacent.
  function runs({ config: { sinks }, length, first }, from = 0) {
    const kept = Math.min(sinks, length), start = Math.max(first, from);
    if (start >= length) return kept ? [[0, kept]] : [];
    return kept < start ? [...(kept ? [[0, kept]] : []), [start, length]] : [[0, length]];
  }

  function look(cache, query, { touch }) { // mark the stored positions that a query sees
    for (const [start, stop] of runs(cache, firstSeen(cache.config, query))) {
      for (const position of range(start, stop)) touch("read", cache.id, slotOf(cache, position));
    }
  }

  FAMILIES.windowed = {
    // slots: by slot, the position that was written there last. first: the oldest position in the ring.
    new: (config) => ({ config, length: 0, first: config.sinks, slots: {} }),

    append(cache, { keys }, { touch }) {
      const { sinks } = cache.config, end = cache.length + tokens(keys), left = end - ringOf(cache.config);
      for (const position of range(cache.length, end)) {
        if (position >= sinks && position < left) continue; // overwritten by later tokens of the same append
        cache.slots[slotOf(cache, position)] = position;
        touch("written", cache.id, slotOf(cache, position));
      }
      Object.assign(cache, { length: end, first: Math.max(cache.first, left) });
    },
    step(cache, args, context) { // attend before the new tokens overwrite old ones (WIN-02)
      look(cache, cache.length, context);
      FAMILIES.windowed.append(cache, args, context);
    },
    attend: (cache, _, context) => look(cache, cache.length - 1, context),
    read: (cache, { positions }, { touch }) => positions.forEach((each) => touch("read", cache.id, slotOf(cache, each))),
    truncate(cache, { length }) {
      Object.assign(cache, { length, first: Math.min(cache.first, Math.max(cache.config.sinks, length)) });
    },
    save: ({ length, first }, _, context) => keep(context, { length, first }),
    load(cache, _, context) {
      Object.assign(cache, kept(context));
      for (const position of runs(cache).flatMap(([start, stop]) => range(start, stop))) {
        cache.slots[slotOf(cache, position)] = position;
        context.touch("written", cache.id, slotOf(cache, position));
      }
    },
    clear: (cache) => FAMILIES.windowed.truncate(cache, { length: 0 }),
  };

  const said = (found) => found.map(([start, stop]) => span(start, stop - 1));

  PICTURES.windowed = {
    draw(cache, world) {
      const { sinks } = cache.config, ring = ringOf(cache.config), next = slotOf(cache, cache.length);
      const seen = firstSeen(cache.config, cache.length);
      const slot = (number) => {
        const position = cache.slots[number];
        const kind = position < sinks ? hue(SINK) : hue(position < seen ? SPARE : SEEN);
        const stale = position >= cache.length ? "kv-stale" : null;
        return cell(position ?? "", position === undefined ? null : kind, stale, number === next ? "kv-next" : null,
          mark(world, cache.id, number));
      };
      const held = runs(cache).reduce((sum, [start, stop]) => sum + stop - start, 0), kept = Math.min(sinks, cache.length);
      const drawn = (title, start, stop, filled) =>
        box(`${title} · slot${stop - start === 1 ? "" : "s"} ${span(start, stop - 1)}`, "",
          row(() => range(start, stop).map(slot), filled, stop - start, sinks + ring));
      return [element("div", "kv-boxes kv-line", sinks ? drawn("sinks", 0, sinks, kept) : null,
        drawn("ring", sinks, sinks + ring, held - kept)),
      element("p", "kv-quiet", `The slot of the next token, ${cache.length}, is ${next}.`)];
    },

    describe(cache) {
      const held = said(runs(cache)), seen = said(runs(cache, firstSeen(cache.config, cache.length)));
      const came = `${many(cache.length, "token")}${held.length ? `, of which ${listed(held)} are stored` : ""}.`;
      return `${came} The next query, at ${cache.length}, sees ${listed([...seen, "itself"])}.`;
    },
  };
})();
