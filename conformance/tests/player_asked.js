// What the state that is drawn says of itself, by the operation that asks a cache the same: how many of a trace's answers, and which not.
([text]) => {
  const { parse, Worlds, numbers, isArray, SIZE_CLASSES } = window.kvref;
  const trace = parse(text), worlds = new Worlds(trace), wrong = [];
  const live = (cache) => cache.sequences.filter((each) => each.live);
  const held = (cache) => new Set(live(cache).flatMap(({ tables }) => tables.flat()).filter((block) => block >= 0)).size;
  const tier = (cache, name) => cache.tokens.filter((token) => token.tier === name).length;
  const sequence = (cache, id) => live(cache).find((each) => each.id === id);
  const positions = ({ length, parents }) => parents.reduce((found, parent) => [...found, parent < 0 ? length : found[parent] + 1], []);
  const PAGES = {
    num_free_blocks: (cache) => cache.config.num_blocks - held(cache),
    length: (cache, args) => sequence(cache, args.sequence).lengths[args.layer],
    block_table: (cache, args) => sequence(cache, args.sequence).tables[args.layer],
  };
  const both = Object.entries(PAGES).flatMap(([name, says]) => [[`paged.${name}`, says], [`prefix.${name}`, says]]);
  const SAYS = {
    ...Object.fromEntries(both),
    "prefix.match": ({ config }, _, { touched }) =>
      [...touched.values()].reduce((sum, kind) => sum + (kind === "found" ? config.block_size : 1), 0) / config.num_layers,
    "blocks.num_free": (pool) => pool.blocks.filter((block) => !block.held).length,
    "blocks.num_used": (pool) => pool.blocks.filter((block) => block.held).length,
    "blocks.references": (pool, args) => pool.blocks[args.block].held,
    "contiguous.seq_len": (cache) => cache.length,
    "contiguous.capacity": (cache) => cache.capacity,
    "quantized.length": (cache, args) => cache.lengths[args.layer],
    "tiered.total_tokens": (cache) => cache.tokens.length,
    "tiered.tier_of": (cache, args) => cache.tokens.find((token) => token.position === args.position)?.tier,
    "tiered.stats": (cache) => [tier(cache, "tail"), tier(cache, "warm"), tier(cache, "store")],
    "buffers.stats": (pool) => pool.free,
    "buffer.length": (one, _, world) => world.objects.get(one.pool).held.find((each) => each.id === one.id).length,
    "engine.length": (one, args) => one.sessions.find((each) => each.live && each.id === args.session).tokens.length,
    "windowed.length": (cache) => cache.length,
    "recurrent.length": (cache, args) => sequence(cache, args.sequence).length,
    "tree.length": (cache, args) => sequence(cache, args.sequence).length,
    "tree.positions": (cache, args) => positions(sequence(cache, args.sequence)),
    "ragged.length": (cache, args) => cache.rows[args.row].length,
    "ragged.batch_size": (cache) => cache.rows.length,
    "pruned.length": (cache) => cache.length,
    "pruned.stored_tokens": (cache) => cache.heads[0].length,
    "pruned.positions": (cache, args) => cache.heads[args.head],
    "recurrent.num_free_blocks": (cache) =>
      cache.config.num_blocks - live(cache).length - live(cache).filter(({ parts }) => parts).length
        - cache.checkpoints.filter(({ users }) => users).length,
    "recurrent.match": (cache, _, { touched }) =>
      cache.checkpoints.find(({ id }) => touched.get([cache.id, "checkpoint", id].join("/")) === "found")?.length ?? 0,
    "pooled.total_tokens": (cache) => cache.next - cache.first,
    "pooled.stats": (cache) => Math.ceil((cache.next - cache.first) / cache.config.tokens_per_block),
  };
  const ANSWER = {
    "tiered.stats": (said) => [said.tail_tokens, said.warm_tokens, said.store_tokens],
    "buffers.stats": (said) => SIZE_CLASSES.map((size) => said.free[size]),
    "pooled.stats": (said) => said.num_blocks,
  };
  let asked = 0;
  trace.exchanges.forEach(({ request, reply }, index) => {
    if (!(request.op in SAYS) || !("ok" in reply) || reply.got) return;
    const world = worlds.at(index + 1);
    const args = Object.fromEntries(Object.entries(request.args).map(([name, value]) => [name, worlds.value(value)]));
    const plain = isArray(reply.ok) ? numbers(reply.ok) : reply.ok;
    const said = JSON.stringify((ANSWER[request.op] ?? ((same) => same))(plain));
    const drawn = JSON.stringify(SAYS[request.op](world.objects.get(request.on), args, world));
    asked += 1;
    if (said !== drawn) wrong.push(`${request.op} in line ${2 * index + 3}: the trace says ${said}, the picture ${drawn}`);
  });
  return { asked, wrong };
}
