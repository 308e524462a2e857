// Caches that are drawn as rows of tokens: trees of drafts, ragged batches and pruned caches. A cell shows the position of a token.
"use strict";

(() => {
  const { FAMILIES, PICTURES, box, cell, element, hue, isArray, letter, listed, many, mark, more, numbers, range, row, tokens } = window.kvref;
  const MOST = 512; // maximum number of boxes
  const list = (values) => (isArray(values) ? numbers(values) : values);
  const stacked = (titled, world, id) => element("div", "kv-boxes", ...titled.slice(0, MOST).map(({ title, positions, number, name = number }) =>
    box(title, hue(number), row(() => positions.map((position) => cell(position, hue(number), mark(world, id, name, position))),
      positions.length, positions.length, titled.reduce((sum, each) => sum + each.positions.length, 0)))));

  // Trees of drafts: the parents of the nodes of each sequence (-1: the last committed token), and the positions of the nodes.

  const live = (cache) => cache.sequences.filter((each) => each.live);
  const find = (cache, id) => live(cache).find((each) => each.id === id);
  const path = ({ parents }, node) => (node < 0 ? [] : [...path({ parents }, parents[node]), node]);
  const position = (sequence, node) => sequence.length + path(sequence, node).length - 1;

  function openSequence(cache, length, { reply }) {
    cache.sequences.push({ id: reply.ok, number: cache.sequences.length, live: true, length, parents: [] });
  }

  FAMILIES.tree = {
    new: (config) => ({ config, sequences: [] }),
    create: (cache, _, context) => openSequence(cache, 0, context),
    fork: (cache, { sequence }, context) => openSequence(cache, find(cache, sequence).length, context),
    drop: (cache, { sequence }) => Object.assign(find(cache, sequence), { live: false }),
    append(cache, { sequence, keys }, { touch }) {
      const found = find(cache, sequence), start = found.length;
      found.length += tokens(keys);
      range(start, found.length).forEach((each) => touch("written", cache.id, found.number, each));
    },
    draft(cache, { sequence, parents }, { touch }) {
      const found = find(cache, sequence);
      list(parents).forEach((parent) => touch("written", cache.id, found.number, "node", found.parents.push(Number(parent)) - 1));
    },
    truncate: (cache, { sequence, length }) => Object.assign(find(cache, sequence), { length }),
    accept(cache, { sequence, node }, { touch }) { // commit one path (TREE-07)
      const found = find(cache, sequence), start = found.length;
      found.length += path(found, node).length;
      found.parents = [];
      range(start, found.length).forEach((each) => touch("moved", cache.id, found.number, each));
    },
    reject: (cache, { sequence }) => Object.assign(find(cache, sequence), { parents: [] }),
    read(cache, { sequence }, { touch }) {
      const found = find(cache, sequence);
      range(0, found.length).forEach((each) => touch("read", cache.id, found.number, each));
    },
    attend(cache, { sequence, nodes }, context) {
      const found = find(cache, sequence);
      FAMILIES.tree.read(cache, { sequence }, context);
      list(nodes).flatMap((node) => path(found, Number(node))).forEach((node) =>
        context.touch("read", cache.id, found.number, "node", node));
    },
  };

  PICTURES.tree = {
    draw(cache, world) {
      const committed = live(cache).map(({ number, length }) =>
        ({ title: `${letter(number)} · ${many(length, "token")}`, positions: range(0, length), number }));
      const nodes = live(cache).filter(({ parents }) => parents.length).map((sequence) =>
        box(`tree of ${letter(sequence.number)} · node: position, parent`, hue(sequence.number), element("span", "kv-cells",
          ...sequence.parents.map((parent, node) => cell(`${node}: ${position(sequence, node)}, ${parent < 0 ? "–" : parent}`,
            hue(sequence.number), mark(world, cache.id, sequence.number, "node", node))))));
      return [stacked(committed, world, cache.id), element("div", "kv-boxes", ...nodes.slice(0, MOST)),
        more(committed.length + nodes.length - MOST)];
    },
    describe(cache) {
      const said = live(cache).slice(0, 8).map((sequence) => {
        const leaves = sequence.parents.flatMap((_, node) => (sequence.parents.includes(node) ? [] : [path(sequence, node).join("–")]));
        return `${letter(sequence.number)} has ${many(sequence.length, "token")}${leaves.length ? ` and a tree with the paths ${listed(leaves)}` : ""}`;
      });
      return `${said.join("; ") || "No sequence"}.`;
    },
  };

  // Ragged batches: the length of each row. origin: the number of the row when it joined, which its color shows.

  const join = (cache, lengths) => lengths.forEach((length) => cache.rows.push({ length, origin: cache.joined++ }));
  const counted = (counts, rows, columns) => (counts === undefined || counts === null ? Array(rows).fill(columns) : list(counts).map(Number));

  FAMILIES.ragged = {
    new(config) {
      const cache = { config, rows: [], joined: 0 };
      join(cache, range(0, config.batch_size).map(() => 0));
      return cache;
    },
    append(cache, { keys, counts }, { touch }) {
      counted(counts, cache.rows.length, tokens(keys, 2)).forEach((count, number) => {
        const one = cache.rows[number], start = one.length;
        one.length += count;
        range(start, one.length).forEach((each) => touch("written", cache.id, number, each));
      });
    },
    extend(cache, { keys, counts }, { touch }) {
      const before = cache.rows.length;
      join(cache, counted(counts, tokens(keys), tokens(keys, 2)));
      cache.rows.slice(before).forEach(({ length }, at) =>
        range(0, length).forEach((each) => touch("written", cache.id, before + at, each)));
    },
    filter(cache, { rows }, { touch }) {
      cache.rows = list(rows).map((number) => ({ ...cache.rows[Number(number)] }));
      cache.rows.forEach(({ length }, number) => range(0, length).forEach((each) => touch("moved", cache.id, number, each)));
    },
    trim: (cache, { counts }) => list(counts).forEach((count, number) => { cache.rows[number].length -= Number(count); }),
    read: (cache, { row: number }, { touch }) =>
      range(0, cache.rows[Number(number)].length).forEach((each) => touch("read", cache.id, number, each)),
    attend: (cache, _, context) => cache.rows.forEach((__, number) => FAMILIES.ragged.read(cache, { row: number }, context)),
  };

  PICTURES.ragged = {
    draw: (cache, world) => [stacked(cache.rows.map(({ length, origin }, number) =>
      ({ title: `row ${number} · ${many(length, "token")}`, positions: range(0, length), number: origin, name: number })), world, cache.id),
    more(cache.rows.length - MOST)],
    describe: (cache) => `Rows of ${listed(cache.rows.slice(0, 16).map(({ length }) => many(length, "token")))}.`,
  };

  // Pruned caches: the positions that each head stores.

  const rowsOf = (array, count) => { // an array of two axes as `count` lists
    const flat = numbers(array), width = flat.length / count;
    return range(0, count).map((at) => flat.slice(at * width, (at + 1) * width));
  };

  FAMILIES.pruned = {
    new: (config) => ({ config, length: 0, heads: range(0, config.num_kv_heads).map(() => []) }),
    append(cache, { keys }, { touch }) {
      const start = cache.length;
      cache.length += tokens(keys);
      cache.heads.forEach((stored, head) => range(start, cache.length).forEach((each) => {
        stored.push(each);
        touch("written", cache.id, head, each);
      }));
    },
    prune(cache, { scores, keep, sinks = 0, recent = 0 }, { touch }) { // of equal scores the earlier token stays (PRUNED-02)
      const stored = cache.heads[0].length, most = Number(keep);
      if (stored <= most) return;
      const all = rowsOf(scores, cache.heads.length);
      cache.heads = cache.heads.map((positions, head) => {
        const rank = (at) => (at < Number(sinks) || at >= stored - Number(recent) ? Infinity : all[head][at]);
        const order = range(0, stored).sort((a, b) => (rank(a) === rank(b) ? a - b : rank(b) - rank(a)));
        const kept = order.slice(0, most).sort((a, b) => a - b).map((at) => positions[at]);
        kept.forEach((each) => touch("moved", cache.id, head, each));
        return kept;
      });
    },
    truncate(cache, { length }) {
      Object.assign(cache, { length, heads: cache.heads.map((stored) => stored.filter((each) => each < length)) });
    },
    clear: (cache) => FAMILIES.pruned.truncate(cache, { length: 0 }),
    read: (cache, _, { touch }) => cache.heads.forEach((stored, head) => stored.forEach((each) => touch("read", cache.id, head, each))),
    attend: (cache, args, context) => FAMILIES.pruned.read(cache, args, context),
  };

  PICTURES.pruned = {
    draw: (cache, world) => [stacked(cache.heads.map((positions, number) =>
      ({ title: `head ${number} · ${many(positions.length, "token")}`, positions, number })), world, cache.id),
    more(cache.heads.length - MOST)],
    describe: (cache) => `${many(cache.length, "token")}, of which each head stores ${cache.heads[0].length}.`,
  };
})();
