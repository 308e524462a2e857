// The effect of calls on sequences in blocks: the families paged and prefix. A table lists block numbers, and each block has a list
// of the table entries that refer to it. Numbers beyond those of the pool are "unseen" blocks: blocks of a sequence whose number no
// reply contains. Where the specification leaves a choice to the cache, kvref's choice is assumed until a reply contradicts it.
"use strict";

(() => {
  const { FAMILIES, counted, fill, isArray, keep, kept, numbers, range, tokens } = window.kvref;
  const NONE = -1; // in place of a block that was released (WIN-09)

  const paged = {
    // A block has holders (the table entries that list it), slots (what was written there last) and found (the copies that it is
    // part of). A copy is the content of a key: one block per layer. waiting: evictable cached blocks, longest unused first.
    new: (config) => ({ config, sequences: [], used: 0, waiting: [], copies: new Map(), keys: new Map(),
      blocks: counted(config.num_blocks, empty) }),

    create(cache, _, { reply }) {
      const tables = fill(cache.config.num_layers, []), lengths = fill(cache.config.num_layers, 0);
      const told = { salt: "", adapter: "", media: [], tokens: [], keys: [] };
      const made = { id: reply.ok, number: cache.sequences.length, live: true, tables, lengths, told };
      cache.sequences.push(made);
      return made;
    },

    fork(cache, { sequence }, context) {
      const parent = find(cache, sequence);
      if (!parent) return;
      const child = paged.create(cache, {}, context);
      parent.tables.forEach((table, layer) => table.forEach((block) => {
        if (block === NONE) child.tables[layer].push(NONE);
        else hold(cache, child, layer, block);
      }));
      Object.assign(child, { lengths: [...parent.lengths], told: structuredClone(parent.told) });
    },

    drop(cache, { sequence }) {
      const found = find(cache, sequence);
      if (!found) return;
      cut(cache, found, 0); // the content of the slots stays
      found.live = false;
    },

    truncate(cache, { sequence, length }) {
      const found = find(cache, sequence);
      if (!found) return;
      found.lengths.fill(length);
      forget(cache, found, length);
      cut(cache, found, entries(cache, length));
    },

    release_before(cache, { sequence, position }, { touch }) {
      const tables = find(cache, sequence)?.tables ?? [];
      for (const entry of range(0, entryOf(cache, position))) {
        tables.forEach((table, layer) => {
          if (table[entry] !== NONE) touch("freed", cache.id, table[entry]);
          release(cache, find(cache, sequence), layer, table[entry]);
          table[entry] = NONE;
        });
      }
    },

    remove(cache, { sequence, start, stop }, context) {
      const found = find(cache, sequence), gap = stop - start;
      if (!found || !gap) return;
      found.lengths.forEach((length, layer) => {
        own(cache, found, layer, start, length - gap, context);
        for (const position of range(start, length - gap)) set(cache, found, layer, position, "moved", context);
        found.lengths[layer] = length - gap;
      });
      forget(cache, found, start);
      cut(cache, found, entries(cache, Math.max(...found.lengths)));
    },

    ensure_capacity(cache, { sequence, num_tokens }, context) {
      ensure(cache, find(cache, sequence), entries(cache, num_tokens), context);
    },

    write: (cache, { sequence, layer, start, keys }, context) => put(cache, sequence, layer, start, tokens(keys), context),

    append(cache, { sequences, layer }, context) {
      for (const sequence of sequences) put(cache, sequence, layer, find(cache, sequence)?.lengths[layer], 1, context);
    },

    append_step(cache, { sequences }, context) {
      for (const layer of range(0, cache.config.num_layers)) paged.append(cache, { sequences, layer }, context);
    },

    save(cache, { sequence, layers, tokens: some, heads }, context) {
      const { lengths, tables } = find(cache, sequence) ?? {};
      const first = cache.config.block_size * tables?.[0].filter((block) => block === NONE).length;
      if (lengths && !layers && !some && !heads) keep(context, { lengths, first });
    },

    load(cache, { sequence }, context) { // replaces the tokens of the sequence
      const found = find(cache, sequence), { lengths, first } = kept(context);
      if (!found) return;
      cut(cache, found, 0);
      forget(cache, found, 0);
      found.lengths = lengths;
      found.tables.forEach((table) => table.push(...fill(entryOf(cache, first), NONE)));
      ensure(cache, found, entries(cache, Math.max(...lengths)), context);
      lengths.forEach((length, layer) => {
        for (const position of range(first, length)) set(cache, found, layer, position, "written", context);
      });
    },

    read: (cache, { sequence, layer, positions }, context) => look(cache, sequence, layer, positions, context),

    gather: (cache, { sequence, layer }, context) =>
      look(cache, sequence, layer, range(0, find(cache, sequence)?.lengths[layer] ?? 0), context),

    gather_batch(cache, { sequences, layer }, context) {
      for (const sequence of sequences) paged.gather(cache, { sequence, layer }, context);
    },

    attend: (cache, args, context) => paged.gather(cache, args, context),

    block_table(cache, { sequence, layer }, context) {
      if (context.answer) listed(cache, sequence, layer, context.answer, context);
    },

    block_tables(cache, { sequences, layer }, context) {
      const width = context.reply.ok?.shape?.[1];
      if (width === undefined || !context.answer) return;
      sequences.forEach((sequence, row) => {
        const blocks = context.answer.slice(row * width, (row + 1) * width);
        const released = find(cache, sequence)?.tables[layer].filter((block) => block === NONE).length ?? 0;
        const end = Math.max(released, blocks.findLastIndex((block) => block !== NONE) + 1); // the rest is padding
        listed(cache, sequence, layer, blocks.slice(0, end), context);
      });
    },

    slot_mapping(cache, { sequence, layer, start }, context) {
      const { block_size } = cache.config, found = find(cache, sequence);
      context.answer?.forEach((slot, index) => {
        if (found) placed(cache, found, layer, entryOf(cache, start + index), Math.floor(slot / block_size), context);
      });
    },
  };

  const find = (cache, sequence) => cache.sequences.find((each) => each.live && each.id === sequence);
  const empty = () => ({ holders: [], slots: [], found: [] });
  const entries = (cache, count) => Math.ceil(count / cache.config.block_size);
  const entryOf = (cache, position) => Math.floor(position / cache.config.block_size);
  const slotOf = (cache, position) => position % cache.config.block_size;

  // Add a block at the end of a table, or put it into an existing entry.
  function hold(cache, sequence, layer, block, entry = sequence.tables[layer].length) {
    const one = (cache.blocks[block] ??= empty());
    if (!one.holders.length) {
      cache.used += 1;
      if (one.found.length) cache.waiting.splice(cache.waiting.indexOf(block), 1);
    }
    one.holders.push({ number: sequence.number, layer, entry });
    sequence.tables[layer][entry] = block;
  }

  function release(cache, sequence, layer, block) {
    if (block === NONE) return;
    const one = cache.blocks[block];
    one.holders.splice(one.holders.findIndex((each) => each.number === sequence.number && each.layer === layer), 1);
    if (one.holders.length) return;
    cache.used -= 1;
    if (one.found.length) cache.waiting.push(block);
  }

  // Allocate a block for an entry of a table: a free one, or else evict the cached block that is unused for longest.
  function take(cache, sequence, layer, entry, context) {
    const known = context.block(sequence.id, layer, entry), { num_blocks } = cache.config;
    if (cache.blocks[known]?.found.length) lose(cache, known);
    else if (cache.waiting.length && cache.used + cache.waiting.length >= num_blocks) lose(cache, cache.waiting[0]);
    const block = known ?? unseen(cache);
    hold(cache, sequence, layer, block, entry);
    context.touch("taken", cache.id, block);
    return block;
  }

  function unseen(cache) { // make an unseen block, with unknown content
    const left = cache.blocks.findIndex(({ holders, found }, number) =>
      number >= cache.config.num_blocks && !holders.length && !found.length);
    const number = left < 0 ? cache.blocks.length : left;
    cache.blocks[number] = empty();
    return number;
  }

  function lose(cache, block) { // remove its copies from the prefix index, in all layers (PREFIX-07)
    for (const copy of [...cache.blocks[block].found]) {
      const copies = cache.copies.get(copy.key).filter((each) => each !== copy);
      cache.copies.set(copy.key, copies);
      for (const part of copy.blocks) {
        const one = cache.blocks[part];
        one.found = one.found.filter((each) => each !== copy);
        if (!one.found.length) cache.waiting = cache.waiting.filter((each) => each !== part);
      }
    }
  }

  function cut(cache, sequence, count) { // remove entries after the first `count`, the last entry first, in all layers
    const most = Math.max(0, ...sequence.tables.map((table) => table.length));
    for (let entry = most - 1; entry >= count; entry--) {
      sequence.tables.forEach((table, layer) => {
        if (entry < table.length) release(cache, sequence, layer, table.pop());
      });
    }
  }

  function ensure(cache, sequence, count, context) {
    sequence?.tables.forEach((table, layer) => {
      for (const entry of range(table.length, count)) take(cache, sequence, layer, entry, context);
    });
  }

  // Copy-on-write: before a write, replace blocks that are shared (SHARE-05) or cached (PREFIX-14) by copies.
  function own(cache, sequence, layer, start, stop, context) {
    for (const entry of start < stop ? range(entryOf(cache, start), entries(cache, stop)) : []) {
      const block = sequence.tables[layer][entry], { holders, slots, found } = cache.blocks[block];
      if (!found.length && holders.every(({ number }) => number === sequence.number)) continue;
      const copied = take(cache, sequence, layer, entry, context); // allocated before the other block is freed
      release(cache, sequence, layer, block);
      move(cache, sequence, layer, entry, slots, copied, context);
    }
  }

  // Copy the tokens of an entry into the block that it lists now.
  function move(cache, sequence, layer, entry, slots, block, { touch }) {
    const { block_size } = cache.config, count = Math.min(block_size, sequence.lengths[layer] - entry * block_size);
    for (const slot of range(0, count)) {
      cache.blocks[block].slots[slot] = slots[slot];
      touch("moved", cache.id, block, slot);
    }
  }

  function put(cache, id, layer, start, count, context) {
    const sequence = find(cache, id);
    if (!sequence) return;
    if (count && start < sequence.lengths[layer]) forget(cache, sequence, start);
    ensure(cache, sequence, entries(cache, start + count), context);
    own(cache, sequence, layer, start, start + count, context);
    for (const position of range(start, start + count)) set(cache, sequence, layer, position, "written", context);
    sequence.lengths[layer] = Math.max(sequence.lengths[layer], start + count);
  }

  function set(cache, sequence, layer, position, kind, { touch }) {
    const block = sequence.tables[layer][entryOf(cache, position)], slot = slotOf(cache, position);
    cache.blocks[block].slots[slot] = { number: sequence.number, position };
    touch(kind, cache.id, block, slot);
  }

  function look(cache, id, layer, positions, { touch }) {
    const sequence = find(cache, id);
    for (const position of positions) {
      const block = sequence?.tables[layer][entryOf(cache, position)];
      if (block >= 0) touch("read", cache.id, block, slotOf(cache, position));
    }
  }

  // Correct a table by a reply that contains it.
  function listed(cache, id, layer, blocks, context) {
    const sequence = find(cache, id);
    if (!sequence) return;
    while (sequence.tables[layer].length > blocks.length) release(cache, sequence, layer, sequence.tables[layer].pop());
    blocks.forEach((block, entry) => placed(cache, sequence, layer, entry, block, context));
  }

  function placed(cache, sequence, layer, entry, block, context) {
    const table = sequence.tables[layer], before = table[entry];
    if (entry > table.length || (entry < table.length && context.same(before, block))) return;
    hold(cache, sequence, layer, block, entry);
    if (before === undefined) return;
    release(cache, sequence, layer, before);
    move(cache, sequence, layer, entry, cache.blocks[before].slots, block, { touch: () => {} });
  }

  // Un-commit the tokens of a sequence from `length` on (PREFIX-02).
  function forget(cache, { told }, length) {
    told.tokens.splice(length);
    told.keys.splice(entryOf(cache, length));
    told.media = told.media.filter(([start]) => start < length).map(([start, stop, content]) => [start, Math.min(stop, length), content]);
  }

  const list = (told) => (isArray(told) ? numbers(told) : told);

  // The keys of the full blocks of tokens. A key is a number for the tokens and media of a block and the key of the block before it.
  function keysOf(cache, { salt, adapter, media }, told) {
    const { block_size } = cache.config;
    let before = keyBefore({ salt, adapter }, []);
    return range(0, entryOf(cache, told.length)).map((entry) => {
      const first = entry * block_size, next = first + block_size;
      const within = media.filter(([start, stop]) => start < next && stop > first)
        .map(([start, stop, content]) => [start - first, Math.min(stop, next) - first, content]);
      const words = `${before}:${told.slice(first, next)}:${JSON.stringify(within)}`;
      if (!cache.keys.has(words)) cache.keys.set(words, cache.keys.size);
      before = cache.keys.get(words);
      return before;
    });
  }

  const promptOf = ({ salt = "", adapter = "", media = [] }) => ({ salt, adapter, media }); // what a key contains beside tokens

  // What is before the block after these: the key of the last one, or, of a first block, salt and adapter.
  const keyBefore = ({ salt, adapter }, keys) => keys.at(-1) ?? JSON.stringify([salt, adapter]);

  // What each position contains: its token, and the content and its part that it stands for.
  const contents = ({ media }, told, start, stop) => told.slice(start, stop).map((token, index) => {
    const position = start + index, item = media.find(([first, last]) => first <= position && position < last);
    return `${token}:${JSON.stringify(item && [item[2], position - item[0]])}`;
  });

  // How many tokens after the full blocks of a hit a cached block begins with, and this block in each layer (PREFIX-19).
  function rest(cache, told, prompt, copies) {
    const { block_size } = cache.config, start = copies.length * block_size, none = { count: 0, blocks: [] };
    const wanted = contents(prompt, told, start, Math.min(start + block_size, told.length - 1));
    const last = keyBefore(prompt, copies.map(({ key }) => key));
    return [...cache.copies.values()].flat().filter((copy) => copy.before === last).reduce((most, { content, blocks }) => {
      const other = wanted.findIndex((each, slot) => each !== content[slot]);
      const count = other < 0 ? wanted.length : other;
      return count > most.count ? { count, blocks } : most;
    }, none);
  }

  function hit(cache, told, prompt) { // the longest prefix in cached blocks, but never all tokens (PREFIX-01)
    const copies = keysOf(cache, prompt, told.slice(0, -1)).map((key) => cache.copies.get(key)?.[0]);
    const none = copies.findIndex((copy) => !copy);
    return none < 0 ? copies : copies.slice(0, none);
  }

  const prefix = {
    ...paged,

    begin(cache, { tokens: given, ...names }, context) {
      const told = list(given), sequence = paged.create(cache, {}, context), prompt = promptOf(names), copies = hit(cache, told, prompt);
      for (const copy of copies) {
        copy.blocks.forEach((block, layer) => {
          hold(cache, sequence, layer, block);
          context.touch("found", cache.id, block);
        });
      }
      const { count, blocks } = context.tokenHits ? rest(cache, told, prompt, copies) : { count: 0, blocks: [] };
      const slots = blocks.map((block) => [...cache.blocks[block].slots]); // the new sequence can get the block itself
      sequence.lengths.fill(copies.length * cache.config.block_size + count);
      sequence.told = { ...prompt, tokens: told.slice(0, sequence.lengths[0]), keys: copies.map(({ key }) => key) };
      ensure(cache, sequence, entries(cache, told.length), context);
      slots.forEach((each, layer) => move(cache, sequence, layer, copies.length, each, sequence.tables[layer][copies.length], context));
    },

    match(cache, { tokens: given, ...names }, { touch, tokenHits }) {
      const told = list(given), prompt = promptOf(names), copies = hit(cache, told, prompt);
      for (const { blocks } of copies) blocks.forEach((block) => touch("found", cache.id, block));
      if (!tokenHits) return;
      const { count, blocks } = rest(cache, told, prompt, copies);
      for (const block of blocks) for (const slot of range(0, count)) touch("read", cache.id, block, slot);
    },

    commit(cache, { sequence, tokens: given }, { touch }) {
      const found = find(cache, sequence), told = list(given);
      if (!found || told.length <= found.told.tokens.length) return;
      found.told.tokens = [...told];
      keysOf(cache, found.told, told).forEach((key, entry) => {
        if (entry < found.told.keys.length) return;
        const { block_size } = cache.config, first = entry * block_size;
        const copy = { key, blocks: found.tables.map((table) => table[entry]), before: keyBefore(found.told, found.told.keys),
          content: contents(found.told, told, first, first + block_size) };
        found.told.keys.push(key);
        if (copy.blocks.includes(NONE)) return;
        if (!cache.copies.has(key)) cache.copies.set(key, []);
        if (cache.copies.get(key).some(({ blocks }) => blocks.every((block, layer) => block === copy.blocks[layer]))) return;
        cache.copies.get(key).push(copy);
        for (const block of copy.blocks) {
          cache.blocks[block].found.push(copy);
          touch("found", cache.id, block);
        }
      });
    },

    reset(cache) {
      Object.assign(cache, { waiting: [], copies: new Map() });
      for (const block of cache.blocks) if (block) block.found = [];
    },
  };

  Object.assign(FAMILIES, { paged, prefix });
})();
