// The effect of each call on the state of an object, per family, according to the specification: `new` returns the initial state,
// the others change it. The context contains the block that a cache chose, if it is known, and `touch`, which marks a place in
// the picture.
"use strict";

(() => {
  const SIZE_CLASSES = [1, 4, 16, 64, 256].map((kib) => kib * 1024); // bytes (BUF-01)
  const COUNTED = 2 ** 20; // maximum number of blocks, slots or positions per call: more would block the page

  const tokens = (array, axis = 0) => array?.shape?.[axis] ?? 0;
  const counted = (count, make) => {
    if (count > COUNTED) throw new RangeError(`${count}: too many to draw`);
    return Array.from({ length: Math.max(0, count) }, (_, index) => make(index));
  };
  const fill = (count, value) => counted(count, () => structuredClone(value));
  const range = (start, stop) => counted(stop - start, (index) => start + index);

  // Saved data is identified by the request that saved it, not by its bytes. There is no picture for other files, nor for parts.
  const keep = ({ world, id }, content) => world.saved.set(id, structuredClone(content));
  function kept({ world, file }) {
    if (!world.saved.has(file)) throw new TypeError("unknown content of a file that this trace did not save as a whole");
    return structuredClone(world.saved.get(file));
  }

  const blocks = {
    new: ({ num_blocks }) => ({ blocks: fill(num_blocks, { held: 0, times: 0 }) }), // held: the number of references
    allocate(pool, _, { reply, touch }) {
      const block = pool.blocks[reply.ok];
      if (!block) return;
      block.held = 1;
      block.times += 1;
      touch("taken", pool.id, reply.ok);
    },
    allocate_many(pool, _, { reply, touch }) {
      for (const block of reply.ok ?? []) blocks.allocate(pool, {}, { reply: { ok: block }, touch });
    },
    share(pool, { block }, { touch }) {
      if (pool.blocks[block]) pool.blocks[block].held += 1;
      touch("taken", pool.id, block);
    },
    free(pool, { block }, { touch }) {
      if (!pool.blocks[block]) return;
      pool.blocks[block].held -= 1;
      touch("freed", pool.id, block);
    },
  };

  const contiguous = {
    new: (config) => ({ config, length: 0, written: 0, capacity: Math.min(config.initial_capacity, config.max_seq_len) }),
    append: (cache, { keys }, context) => contiguous.put(cache, tokens(keys, 2), context),
    append_fused: (cache, { key_values }, context) => contiguous.put(cache, tokens(key_values, 3), context),
    advance(cache, { count }) {
      cache.length += count;
      cache.written = Math.max(cache.written, cache.length);
    },
    reset(cache) {
      cache.length = 0;
    },
    truncate(cache, { length }) {
      cache.length = length;
    },
    read: (cache, _, { touch }) => range(0, cache.length).forEach((slot) => touch("read", cache.id, slot)),
    put(cache, count, { touch }) {
      let capacity = Math.max(cache.capacity, 1);
      while (capacity < cache.length + count) capacity *= 2; // CONTIG-04
      if (cache.length + count > cache.capacity) {
        cache.capacity = Math.min(capacity, cache.config.max_seq_len);
        cache.written = cache.length; // new memory, into which only the tokens were copied
        touch("grown", cache.id);
      }
      range(cache.length, cache.length + count).forEach((slot) => touch("written", cache.id, slot));
      cache.length += count;
      cache.written = Math.max(cache.written, cache.length);
    },
  };

  const quantized = {
    new: (config) => ({ config, lengths: fill(config.num_layers, 0), written: fill(config.num_layers, 0) }),
    append: (cache, { layer, keys }, context) => quantized.put(cache, layer, tokens(keys), context),
    append_step: (cache, _, context) => cache.lengths.forEach((__, layer) => quantized.put(cache, layer, 1, context)),
    clear: (cache) => cache.lengths.fill(0),
    truncate: (cache, { length }) => cache.lengths.fill(length),
    save: ({ lengths }, _, context) => keep(context, lengths),
    load(cache, _, context) {
      quantized.clear(cache);
      kept(context).forEach((length, layer) => quantized.put(cache, layer, length, context));
    },
    read_token: (cache, { layer, position }, { touch }) => touch("read", cache.id, layer, position),
    read_head: (cache, args, context) => quantized.read_token(cache, args, context),
    read_tokens(cache, { layer, positions }, { touch }) {
      for (const position of positions) touch("read", cache.id, layer, position);
    },
    attend(cache, { layer }, context) {
      quantized.read_tokens(cache, { layer, positions: range(0, cache.lengths[layer]) }, context);
    },
    put(cache, layer, count, { touch }) {
      range(cache.lengths[layer], cache.lengths[layer] + count).forEach((position) => touch("written", cache.id, layer, position));
      cache.lengths[layer] += count;
      cache.written[layer] = Math.max(cache.written[layer], cache.lengths[layer]);
    },
  };

  const tiered = {
    new: (config) => ({ config, next: 0, tokens: [] }), // oldest first: {position, tier, format}
    append(cache, { keys }, context) {
      const { tail_dtype, max_tokens } = cache.config;
      for (const position of range(cache.next, cache.next + tokens(keys))) {
        cache.tokens.push({ position, tier: "tail", format: tail_dtype });
        context.touch("written", cache.id, position);
      }
      cache.next += tokens(keys);
      cache.tokens.splice(0, Math.max(0, cache.tokens.length - max_tokens));
      tiered.migrate(cache, context);
    },
    update_policy(cache, changes, context) {
      Object.assign(cache.config, changes);
      tiered.migrate(cache, context);
    },
    clear: (cache) => Object.assign(cache, { next: 0, tokens: [] }),
    truncate(cache, { length }) { // it succeeds only if no later token has migrated (EDIT-06)
      Object.assign(cache, { next: length, tokens: cache.tokens.filter(({ position }) => position < length) });
    },
    save: ({ next, tokens: told }, _, context) => keep(context, { next, tokens: told }),
    load(cache, _, context) {
      Object.assign(cache, kept(context));
      cache.tokens.forEach(({ position }) => context.touch("written", cache.id, position));
    },
    read: (cache, _, { touch }) => cache.tokens.forEach(({ position }) => touch("read", cache.id, position)),
    attend: (cache, args, context) => tiered.read(cache, args, context),
    migrate(cache, { touch }) {
      const { tail_length, warm_length, warm_format, store_format } = cache.config;
      const tiers = [["tail", tail_length, "warm", warm_format], ["warm", warm_length, "store", store_format]];
      for (const [tier, room, next, format] of tiers) {
        const here = cache.tokens.filter((token) => token.tier === tier);
        for (const token of here.slice(0, Math.max(0, here.length - room))) {
          Object.assign(token, { tier: next, format });
          touch("moved", cache.id, token.position);
        }
      }
    },
  };

  const buffers = {
    new: ({ max_buffers }) => ({ max_buffers, free: fill(SIZE_CLASSES.length, 0), held: [] }),
    acquire(pool, { num_bytes }, { world, id, touch }) {
      const at = buffers.take(pool, num_bytes);
      if (at < 0) return;
      pool.held.push({ id, at, length: 0 });
      world.objects.set(id, { id, family: "buffer", pool: pool.id });
      touch("written", pool.id, id);
    },
    prewarm(pool, { size, count }) {
      const at = SIZE_CLASSES.findIndex((each) => each >= size);
      if (at >= 0) pool.free[at] = Math.min(pool.max_buffers, pool.free[at] + count);
    },
    clear: (pool) => pool.free.fill(0),
    take(pool, num_bytes) { // returns the index of the size class, or -1 if there is none
      const at = SIZE_CLASSES.findIndex((size) => size >= num_bytes);
      if (at >= 0 && pool.free[at]) pool.free[at] -= 1;
      return at;
    },
    give(pool, at) {
      pool.free[at] = Math.min(pool.max_buffers, pool.free[at] + 1);
    },
  };

  const held = ({ world, on }, buffer) => world.objects.get(buffer.pool).held.find((each) => each.id === on);
  const buffer = {
    extend(one, { values }, context) {
      const found = held(context, one);
      if (found) found.length += tokens(values);
      context.touch("written", one.pool, one.id);
    },
    values: (one, _, { touch }) => touch("read", one.pool, one.id),
    clear(one, _, context) {
      const found = held(context, one);
      if (found) found.length = 0;
    },
    release(one, _, context) {
      const pool = context.world.objects.get(one.pool), found = held(context, one);
      if (!found) return; // already released
      pool.held.splice(pool.held.indexOf(found), 1);
      buffers.give(pool, found.at);
    },
  };

  const pooled = {
    new: (config) => ({ config, next: 0, first: 0 }), // first: the oldest stored token; all blocks but the last are full
    append(cache, { keys }, context) {
      const { tokens_per_block: size, max_tokens, num_kv_heads, head_dim } = cache.config;
      const before = Math.ceil((cache.next - cache.first) / size), total = cache.next + tokens(keys) - cache.first;
      const gone = Math.max(0, Math.ceil((total - max_tokens) / size)); // evicted blocks (POOL-03)
      const pool = context.world.objects.get(cache.config.pool?.handle), bytes = 4 * size * num_kv_heads * head_dim;
      range(cache.next, cache.next + tokens(keys)).forEach((position) => context.touch("written", cache.id, position));
      pooled.take(pool, 2 * (Math.ceil(total / size) - Math.max(before, gone)), bytes);
      pooled.release(pool, 2 * Math.min(gone, before), bytes);
      cache.next += tokens(keys);
      cache.first += gone * size;
    },
    clear(cache, _, { world }) {
      const { tokens_per_block: size, num_kv_heads, head_dim } = cache.config;
      const blocks = Math.ceil((cache.next - cache.first) / size);
      pooled.release(world.objects.get(cache.config.pool?.handle), 2 * blocks, 4 * size * num_kv_heads * head_dim);
      cache.first = cache.next = 0;
    },
    read: (cache, _, { touch }) => range(cache.first, cache.next).forEach((position) => touch("read", cache.id, position)),
    take(pool, count, bytes) {
      if (pool) range(0, count).forEach(() => buffers.take(pool, bytes));
    },
    release(pool, count, bytes) {
      const at = SIZE_CLASSES.findIndex((size) => size >= bytes);
      if (pool) range(0, count).forEach(() => buffers.give(pool, at));
    },
  };

  // Sessions as lists of tokens; null for tokens that the trace does not contain. said: the positions of generated tokens.
  const engine = {
    new: (config) => ({ config, sessions: [], saved: new Map() }),
    begin(one, id, tokens, said) {
      one.sessions.push({ id, number: one.sessions.length, live: true, tokens: [...tokens], said: [...said] });
    },
    find: (one, id) => one.sessions.find((each) => each.live && each.id === id),
    put(one, id, tokens, kind, { touch }) {
      const session = engine.find(one, id);
      if (!session) return;
      for (const token of tokens) {
        const position = session.tokens.push(token) - 1;
        if (kind === "read") session.said.push(position);
        touch(kind, one.id, session.number, position);
      }
    },
    anew(one, id, tokens) {
      const session = engine.find(one, id);
      if (session) Object.assign(session, { tokens, said: session.said.filter((position) => position < tokens.length) });
    },
    open: (one, _, { reply }) => engine.begin(one, reply.ok, [], []),
    extend: (one, { session, tokens: told }, context) => engine.put(one, session, told, "written", context),
    generate(one, { session, count }, context) {
      const room = one.config.context - (engine.find(one, session)?.tokens.length ?? 0);
      engine.put(one, session, context.reply.ok ?? fill(Math.min(count, room), null), "read", context);
    },
    step(one, { sessions }, context) {
      sessions.forEach((session, at) => engine.put(one, session, [context.reply.ok?.[at] ?? null], "read", context));
    },
    sample(one, { session, n }, { reply, touch }) { // the generated tokens are not stored; all tokens of the session are read
      const found = engine.find(one, session);
      if (n > 0 && reply.ok) found?.tokens.forEach((_, position) => touch("read", one.id, found.number, position));
    },
    cancel: (one, { session }, context) => engine.sample(one, { session, n: 1 }, { ...context, reply: { ok: [] } }),
    save(one, { session }, { reply }) {
      const found = engine.find(one, session);
      if (found) one.saved.set(reply.ok, { tokens: [...found.tokens], said: [...found.said] });
    },
    load(one, { saved }, { reply }) {
      const kept = one.saved.get(saved);
      if (kept) engine.begin(one, reply.ok, kept.tokens, kept.said);
    },
    fork(one, { session }, { reply }) {
      const parent = engine.find(one, session);
      if (parent) engine.begin(one, reply.ok, parent.tokens, parent.said);
    },
    truncate: (one, { session, length }) => engine.anew(one, session, engine.find(one, session)?.tokens.slice(0, length)),
    remove(one, { session, start, stop }) {
      const told = engine.find(one, session)?.tokens ?? [];
      engine.anew(one, session, [...told.slice(0, start), ...told.slice(stop)]);
    },
    close(one, { session }) {
      const found = engine.find(one, session);
      if (found) found.live = false;
    },
  };

  const FAMILIES = { engine, blocks, contiguous, quantized, tiered, buffers, buffer, pooled };
  Object.assign(window.kvref, { FAMILIES, SIZE_CLASSES, counted, fill, keep, kept, range, tokens });
})();
