// The recurrent cache: the effect of calls on states and checkpoints, according to the specification, and their picture. A cell is
// an input of the convolution, with the position of its token; the matrix contains all tokens up to the length.
"use strict";

(() => {
  const { FAMILIES, PICTURES, box, cell, element, hue, keep, kept, letter, listed, many, mark, more, range, row, tokens } = window.kvref;
  const MOST = 512; // maximum number of boxes

  const live = (cache) => cache.sequences.filter((each) => each.live);
  const find = (cache, id) => live(cache).find((each) => each.id === id);
  const owned = (cache) => cache.checkpoints.filter(({ users }) => users > 0);
  const loading = (cache) => live(cache).filter(({ parts }) => parts); // a block has the parts loaded up to now (RECUR-17)
  const used = (cache) => live(cache).length + owned(cache).length + loading(cache).length;
  const evictable = (cache) => cache.released.length;

  function take(cache) { // a block, that of the checkpoint that was released first if no other is free (RECUR-14)
    if (used(cache) + evictable(cache) < cache.config.num_blocks) return;
    const gone = cache.released.shift();
    cache.checkpoints = cache.checkpoints.filter(({ id }) => id !== gone);
  }

  function release(cache, sequence, lengths) { // longer checkpoints first
    for (const length of [...lengths].sort((a, b) => b - a)) {
      const checkpoint = cache.checkpoints.find(({ id }) => id === sequence.has[length]);
      delete sequence.has[length];
      checkpoint.users -= 1;
      if (checkpoint.users) continue;
      if (checkpoint.keys.length) cache.released.push(checkpoint.id);
      else cache.checkpoints = cache.checkpoints.filter((each) => each !== checkpoint);
    }
  }

  function share(cache, checkpoint) {
    checkpoint.users += 1;
    cache.released = cache.released.filter((id) => id !== checkpoint.id);
  }

  const keyOf = (salt, told) => JSON.stringify([salt, told.map(String)]);

  function hit({ checkpoints, config }, told, salt = "") { // the checkpoint of the longest boundary, or undefined (RECUR-11)
    for (let length = Math.floor((told.length - 1) / config.interval) * config.interval; length > 0; length -= config.interval) {
      const found = checkpoints.filter(({ keys }) => keys.includes(keyOf(salt, told.slice(0, length))));
      if (found.length) return found.reduce((first, each) => (each.committed < first.committed ? each : first));
    }
    return undefined;
  }

  function open(cache, { reply, touch }, state) {
    take(cache);
    cache.sequences.push({ id: reply.ok, number: cache.sequences.length, live: true, drafts: [0, 0], ...state });
    touch("written", cache.id, cache.sequences.length - 1);
  }

  function advance(cache, sequence, count, { touch }) {
    if (!sequence || !count) return;
    const start = sequence.length;
    sequence.length += count;
    sequence.drafts = [Math.max(start, sequence.length - cache.config.max_drafts), sequence.length];
    range(Math.max(0, sequence.length - Math.min(count, cache.config.num_inputs)), sequence.length)
      .forEach((position) => touch("written", cache.id, sequence.number, position));
  }

  const look = (cache, { sequence }, { touch }) => touch("read", cache.id, find(cache, sequence)?.number);

  FAMILIES.recurrent = {
    // has: by length, the id of a checkpoint. released: ids of cached checkpoints that no sequence has, in order.
    new: (config) => ({ config, sequences: [], checkpoints: [], released: [], next: 0 }),
    create: (cache, _, context) => open(cache, context, { length: 0, salt: "", told: [], has: {} }),
    fork(cache, { sequence }, context) {
      const { length, salt, told, has } = find(cache, sequence);
      Object.values(has).forEach((id) => share(cache, cache.checkpoints.find((each) => each.id === id)));
      open(cache, context, { length, salt, told: [...told], has: { ...has } });
    },
    begin(cache, { tokens: told, salt = "" }, context) {
      const found = hit(cache, told, salt);
      if (found) share(cache, found);
      const length = found?.length ?? 0;
      open(cache, context, { length, salt, told: told.slice(0, length), has: found ? { [length]: found.id } : {} });
    },
    drop(cache, { sequence }) {
      const found = find(cache, sequence);
      found.live = false;
      release(cache, found, Object.keys(found.has).map(Number));
    },
    append: (cache, { sequence, keys }, context) => advance(cache, find(cache, sequence), tokens(keys, 1), context),
    append_batch(cache, { sequences, counts }, context) {
      sequences.forEach((each, at) => advance(cache, find(cache, each), counts[at], context));
    },
    checkpoint(cache, { sequence }, { touch }) {
      const found = find(cache, sequence);
      if (!found.length || found.length in found.has) return;
      take(cache);
      found.has[found.length] = cache.next;
      cache.checkpoints.push({ id: cache.next, length: found.length, users: 1, keys: [], committed: 0 });
      touch("taken", cache.id, "checkpoint", cache.next);
      cache.next += 1;
    },
    truncate(cache, { sequence, length }, { touch }) {
      const found = find(cache, sequence), [start, stop] = found.drafts;
      release(cache, found, Object.keys(found.has).map(Number).filter((each) => each > length));
      Object.assign(found, { length, told: found.told.slice(0, length), drafts: [start, Math.max(start, Math.min(stop, length))] });
      touch("moved", cache.id, found.number);
    },
    commit(cache, { sequence, tokens: told }, { id, touch }) {
      const found = find(cache, sequence);
      found.told = [...told, ...found.told.slice(told.length)];
      for (const [length, number] of Object.entries(found.has)) {
        const checkpoint = cache.checkpoints.find((each) => each.id === number), key = keyOf(found.salt, found.told.slice(0, length));
        if (length % cache.config.interval || length > found.told.length || checkpoint.keys.includes(key)) continue;
        Object.assign(checkpoint, { keys: [...checkpoint.keys, key], committed: checkpoint.committed || id });
        touch("found", cache.id, "checkpoint", number);
      }
    },
    match(cache, { tokens: told, salt }, { touch }) {
      const found = hit(cache, told, salt);
      if (found) touch("found", cache.id, "checkpoint", found.id);
    },
    reset: (cache) => Object.assign(cache, { checkpoints: [], released: [] }),
    read_inputs: look,
    read_matrix: look,
    apply: look,
    save(cache, { sequence, layers, heads }, context) {
      const { num_layers, num_heads } = cache.config;
      keep(context, { length: find(cache, sequence).length, layers: layers ?? [0, num_layers], heads: heads ?? [0, num_heads] });
    },
    load(cache, { sequence }, context) {
      const found = find(cache, sequence), { length, layers, heads } = kept(context), all = cache.config.num_layers * cache.config.num_heads;
      const loaded = range(...layers).flatMap((layer) => range(...heads).map((head) => `${layer}/${head}`));
      if (loaded.length < all) {
        if (!found.parts) take(cache);
        found.parts = [...new Set([...(found.parts ?? []), ...loaded])];
        if (found.parts.length < all) return;
      }
      release(cache, found, Object.keys(found.has).map(Number));
      Object.assign(found, { length, told: [], drafts: [0, 0], parts: null });
      context.touch("written", cache.id, found.number);
    },
  };

  const restorable = ({ has, drafts: [start, stop], length }) =>
    [...new Set([0, ...Object.keys(has).map(Number), ...range(start, Math.min(stop, length))])].sort((a, b) => a - b);

  PICTURES.recurrent = {
    draw(cache, world) {
      const { num_inputs } = cache.config;
      const cells = (length, kind, number) => row(() => range(length - num_inputs, length).map((position) =>
        (position < 0 ? cell("") : cell(position, kind, mark(world, cache.id, number, position)))), num_inputs, num_inputs);
      const states = live(cache).slice(0, MOST).map(({ number, length }) =>
        box(`${letter(number)} · length ${length}`, `${hue(number)} ${mark(world, cache.id, number) ?? ""}`,
          cells(length, hue(number), number)));
      const names = (id) => live(cache).filter(({ has }) => Object.values(has).includes(id)).map(({ number }) => letter(number));
      const copies = cache.checkpoints.slice(0, MOST).map(({ id, length, keys, users }) =>
        box(`checkpoint at ${length} · ${names(id).join(", ") || "evictable"}${keys.length ? " · cached" : ""}`,
          `${users ? "" : "kv-waiting"} ${mark(world, cache.id, "checkpoint", id) ?? ""}`, cells(length, null, "copy")));
      const free = cache.config.num_blocks - used(cache) - evictable(cache);
      return [element("div", "kv-boxes", ...states, ...copies), more(live(cache).length - MOST),
        element("p", "kv-quiet", `${many(free, "block")} without a state.`)];
    },

    describe(cache) {
      const free = `${cache.config.num_blocks - used(cache)} of ${many(cache.config.num_blocks, "block")} free.`;
      const said = live(cache).slice(0, 8).map((each) =>
        `${letter(each.number)} has the state of ${many(each.length, "token")}, and can be truncated to ${listed(restorable(each).map(String))}`);
      return `${free} ${said.join("; ") || "No sequence"}.`;
    },
  };
})();
