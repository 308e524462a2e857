// The state of an object as a picture of plain HTML elements, and as text for screen readers.
"use strict";

(() => {
  const { SIZE_CLASSES, letter, range } = window.kvref;
  const MANY = 1024; // maximum number of cells; more are drawn as bars
  const MOST = 512; // maximum number of boxes or bars
  const HUES = 6;

  const many = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;
  const listed = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`);
  const span = (first, last) => (first === last ? String(first) : `${first} to ${last}`);

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  const hue = (number) => `kv-hue-${number % HUES}`;
  const cell = (text, ...classes) => element("span", ["kv-cell", ...classes.filter(Boolean)].join(" "), text);
  const mark = (world, ...place) => {
    const kind = world.touched.get(place.join("/"));
    return kind && `kv-${kind}`;
  };
  const more = (count) => (count > 0 ? element("p", "kv-more", `and ${count} more, not drawn`) : null);
  const box = (title, classes, ...children) =>
    element("div", `kv-box ${classes}`, element("span", "kv-name", title), ...children);

  // A row of cells, or, if the page would have too many cells, a bar whose length is the filled part.
  function row(cells, filled, total, onThePage = total) {
    if (onThePage <= MANY) return element("span", "kv-cells", ...cells());
    const bar = element("span", "kv-bar");
    bar.style.setProperty("--filled", `${Math.round((100 * filled) / total)}%`);
    return bar;
  }

  const paged = {
    draw(cache, world) {
      const { block_size, num_blocks, num_layers } = cache.config;
      const all = range(0, cache.blocks.length), kept = all.filter((number) => isHeld(cache, number) || isWaiting(cache, number));
      const someUnseen = kept.some((number) => number >= num_blocks); // then it is unknown which blocks of the pool are free
      const drawn = someUnseen ? kept : all.slice(0, num_blocks);
      const boxes = drawn.slice(0, MOST).map((number) => {
        const length = filled(cache, number);
        const cells = () => range(0, block_size).map((slot) => slotCell(world, cache, number, slot, slot < length));
        return box(`${blockName(cache, number)} · ${whose(cache, number)}`, boxClasses(world, cache, number),
          row(cells, length, block_size, drawn.length * block_size));
      });
      const others = `and ${many(num_blocks - kept.length, "free block")} with unknown numbers`;
      const free = someUnseen ? element("p", "kv-more", others) : null;
      return [element("div", "kv-boxes", ...boxes), more(drawn.length - MOST), free, tables(cache, num_layers)];
    },

    describe(cache) {
      const { num_blocks, num_layers } = cache.config;
      const live = cache.sequences.filter((sequence) => sequence.live);
      const said = live.slice(0, 8).map((sequence) => {
        const { lengths, tables: [first] } = sequence, alike = new Set(lengths).size === 1;
        const tokens = alike ? many(lengths[0], "token") : `${lengths.join(", ")} tokens by layer`;
        const count = first.filter((block) => block >= 0).length;
        const where = count ? ` in ${many(count, "block")}${num_layers > 1 ? " per layer" : ""}` : "";
        return `${letter(sequence.number)} has ${tokens}${where}`;
      });
      const rest = live.length > 8 ? [`${live.length - 8} more sequences`] : [];
      const count = { shared: 0, waiting: cache.waiting.length };
      for (const block of cache.blocks) if (block?.holders.length > 1) count.shared += 1;
      const shared = count.shared ? ` ${many(count.shared, "block")} shared.` : "";
      const waiting = count.waiting ? `, ${count.waiting} of them cached` : "";
      const free = `${num_blocks - cache.used} of ${many(num_blocks, "block")} free${waiting}.`;
      return `${free} ${[...said, ...rest].join("; ") || "No sequence"}.${shared}`;
    },
  };

  const times = (references) => (references > 1 ? ` · ×${references}` : "");
  const isHeld = (cache, number) => cache.blocks[number].holders.length > 0;
  const isWaiting = (cache, number) => !isHeld(cache, number) && cache.blocks[number].found.length > 0;

  // The number of slots of a block with tokens that a sequence can read now, or, for a cached block, after a hit.
  function filled(cache, number) {
    const { block_size } = cache.config;
    if (isWaiting(cache, number)) return block_size;
    const lengths = cache.blocks[number].holders.map(({ number: holder, layer, entry }) =>
      cache.sequences[holder].lengths[layer] - entry * block_size);
    return Math.min(block_size, Math.max(0, ...lengths));
  }

  // "A, B layer 0 · ×2 · cached"
  function whose(cache, number) {
    const { holders, found } = cache.blocks[number];
    if (!holders.length) return found.length ? "cached, evictable" : "free";
    const names = [...new Set(holders.map((each) => letter(each.number)))];
    const named = `${names.slice(0, 4).join(", ")}${names.length > 4 ? "…" : ""}`;
    const layer = cache.config.num_layers > 1 ? ` layer ${holders[0].layer}` : "";
    return `${named}${layer}${times(holders.length)}${found.length ? " · cached" : ""}`;
  }

  function boxClasses(world, cache, number) {
    const { holders } = cache.blocks[number], touched = mark(world, cache.id, number) ?? "";
    if (isWaiting(cache, number)) return `kv-waiting ${touched}`;
    return `${holders.length ? hue(holders[0].number) : "kv-free"} ${holders.length > 1 ? "kv-shared" : ""} ${touched}`;
  }

  const blockName = (cache, number) => (number < cache.config.num_blocks ? String(number) : "?");

  // A slot whose sequence no longer owns it keeps its content until it is written again.
  function slotCell(world, cache, block, slot, live) {
    const held = cache.blocks[block].slots[slot];
    if (!held) return cell("", mark(world, cache.id, block, slot));
    const name = `${letter(held.number)}${held.position}`;
    return cell(name, hue(held.number), live ? null : "kv-stale", mark(world, cache.id, block, slot));
  }

  function tables(cache, num_layers) {
    const live = cache.sequences.filter((sequence) => sequence.live).slice(0, 12);
    const rows = live.flatMap((sequence) => sequence.tables.map((table, layer) => {
      const chip = (block) => element("span", `kv-chip ${block < 0 ? "" : hue(sequence.number)}`, blockName(cache, block));
      const shown = table.slice(0, 64).map(chip);
      const name = `${letter(sequence.number)}${num_layers > 1 ? ` layer ${layer}` : ""}`;
      return element("div", "kv-table", element("span", "kv-name", `table of ${name}`), ...shown,
        table.length > 64 ? "…" : null, element("span", "kv-quiet", many(sequence.lengths[layer], "token")));
    }));
    return element("div", "kv-tables", ...rows);
  }

  const blocks = {
    draw(pool, world) {
      const boxes = pool.blocks.slice(0, MOST).map((block, number) => {
        const classes = `${block.held ? hue(block.times - 1) : "kv-free"} ${block.held > 1 ? "kv-shared" : ""}`;
        return box(String(number), `${classes} ${mark(world, pool.id, number) ?? ""}`, element("span", "kv-quiet", heldBy(block)));
      });
      return [element("div", "kv-boxes", ...boxes), more(pool.blocks.length - MOST)];
    },
    describe(pool) {
      const held = pool.blocks.flatMap((block, number) => (block.held ? [number] : []));
      const which = held.length && held.length <= 16 ? `: ${listed(held)}` : "";
      return `${pool.blocks.length - held.length} of ${many(pool.blocks.length, "block")} free, ${held.length} allocated${which}.`;
    },
  };

  const heldBy = ({ held, times: owner }) =>
    held ? `allocated, owner ${owner}${times(held)}` : owner ? "freed" : "free";

  const contiguous = {
    draw(cache, world) {
      const cells = () => range(0, cache.capacity).map((slot) => {
        const kind = slot < cache.length ? hue(0) : slot < cache.written ? `${hue(0)} kv-stale` : null;
        return cell(slot < cache.written ? String(slot) : "", kind, mark(world, cache.id, slot));
      });
      const grown = mark(world, cache.id) ? "kv-taken" : "";
      const later = Math.min(64, cache.config.max_seq_len - cache.capacity);
      const room = element("span", "kv-cells", ...range(0, later).map(() => cell("", "kv-later")));
      return [box(`capacity ${cache.capacity}`, grown, row(cells, cache.length, cache.capacity)),
        later > 0 ? box(`may grow to ${cache.config.max_seq_len}`, "kv-free", room) : null];
    },
    describe: (cache) => `${many(cache.length, "token")}, room for ${cache.capacity}, at most ${cache.config.max_seq_len}.`,
  };

  const quantized = {
    draw(cache, world) {
      const { capacity, format } = cache.config;
      const rows = cache.lengths.slice(0, MOST).map((length, layer) => {
        const cells = () => range(0, capacity).map((slot) => {
          const kind = slot < length ? hue(layer) : slot < cache.written[layer] ? `${hue(layer)} kv-stale` : null;
          return cell(slot < cache.written[layer] ? String(slot) : "", kind, mark(world, cache.id, layer, slot));
        });
        return box(`layer ${layer} · ${format}`, "", row(cells, length, capacity, capacity * cache.lengths.length));
      });
      return [element("div", "kv-boxes", ...rows), more(cache.lengths.length - MOST)];
    },
    describe({ config, lengths }) {
      const said = lengths.slice(0, 8).map((length, layer) => `Layer ${layer} has ${length} of ${config.capacity} tokens`);
      return `${said.join("; ")}.`;
    },
  };

  const TIERS = { store: "store_format", warm: "warm_format", tail: "tail_dtype" };
  const tiered = {
    draw(cache, world) {
      const evicted = cache.next - cache.tokens.length;
      const drawn = Object.entries(TIERS).map(([tier, format], number) => {
        const here = cache.tokens.filter((token) => token.tier === tier);
        const room = { tail: cache.config.tail_length, warm: cache.config.warm_length }[tier];
        if (room === 0 && !here.length) return null;
        const empty = Math.min(64, Math.max(0, (room ?? 0) - here.length));
        const held = ({ position }) => cell(String(position), hue(number), mark(world, cache.id, position));
        const cells = () => [...here.map(held), ...range(0, empty).map(() => cell(""))];
        const title = `${tier} · ${cache.config[format]}${room ? ` · room for ${room}` : ""}`;
        return box(title, "kv-tier", row(cells, here.length, Math.max(room ?? 0, here.length, 1)));
      });
      const gone = evicted ? box("evicted", "kv-free", element("span", "kv-quiet", span(0, evicted - 1))) : null;
      return [element("div", "kv-boxes kv-line", gone, ...drawn)];
    },
    describe(cache) {
      const words = Object.keys(TIERS).reverse().flatMap((tier) => {
        const here = cache.tokens.filter((token) => token.tier === tier);
        return here.length ? [`${tier}: ${span(here[0].position, here.at(-1).position)}`] : [];
      });
      const evicted = cache.next - cache.tokens.length;
      const parts = [many(cache.tokens.length, "token"), words.join(", "), evicted ? `${evicted} evicted` : ""];
      return `${parts.filter(Boolean).join("; ")}.`;
    },
  };

  const kib = (bytes) => `${bytes / 1024} KiB`;
  const buffers = {
    draw(pool, world) {
      const classes = SIZE_CLASSES.map((size, at) => {
        const held = pool.held.filter((each) => each.at === at);
        const taken = ({ id, length }) => cell(`#${id} · ${length}`, hue(0), mark(world, pool.id, id));
        const free = range(0, Math.min(64, pool.free[at])).map(() => cell("free", "kv-stale"));
        const cells = [...held.slice(0, 64).map(taken), ...free];
        return box(kib(size), cells.length ? "" : "kv-free", element("span", "kv-cells kv-wide", ...cells));
      });
      return [element("div", "kv-boxes kv-line", ...classes)];
    },
    describe(pool) {
      const free = pool.free.map((count, at) => (count ? `${count} of ${kib(SIZE_CLASSES[at])}` : "")).filter(Boolean);
      return `${many(pool.held.length, "buffer")} in use; free: ${listed(free) || "none"}.`;
    },
  };

  const pooled = {
    draw(cache, world) {
      const { tokens_per_block: size } = cache.config;
      const starts = range(0, Math.ceil((cache.next - cache.first) / size)).map((block) => cache.first + block * size);
      const token = (position) => {
        const here = position < cache.next;
        return cell(here ? String(position) : "", here ? hue(0) : null, mark(world, cache.id, position));
      };
      const boxes = starts.slice(-MOST).map((start) => {
        const cells = () => range(start, start + size).map(token);
        const filled = Math.min(size, cache.next - start);
        return box(`tokens ${span(start, start + size - 1)}`, hue(0), row(cells, filled, size, cache.next - cache.first));
      });
      const gone = cache.first ? box("evicted", "kv-free", element("span", "kv-quiet", span(0, cache.first - 1))) : null;
      return [element("div", "kv-boxes", gone, ...boxes), more(starts.length - MOST)];
    },
    describe({ config, first, next }) {
      const blocks = many(Math.ceil((next - first) / config.tokens_per_block), "block");
      return `${many(next - first, "token")} in ${blocks}${first ? `; the oldest ${first} were evicted` : ""}.`;
    },
  };

  const engine = {
    draw(one, world) {
      const live = one.sessions.filter((session) => session.live), all = live.reduce((sum, { tokens }) => sum + tokens.length, 0);
      const boxes = live.slice(0, MOST).map(({ number, tokens, said }) => {
        const token = (id, position) =>
          cell(id === null ? "?" : String(id), said.includes(position) ? hue(number) : null, mark(world, one.id, number, position));
        return box(`${letter(number)} · ${many(tokens.length, "token")}`, hue(number),
          row(() => tokens.map(token), tokens.length, one.config.context, all));
      });
      return [element("div", "kv-boxes kv-line", ...boxes), more(live.length - MOST)];
    },
    describe({ sessions }) {
      const live = sessions.filter((session) => session.live);
      const said = live.slice(0, 8).map(({ number, tokens, said: own }) =>
        `${letter(number)} has ${many(tokens.length, "token")}, ${own.length} of them generated`);
      const rest = live.length > 8 ? [`${live.length - 8} more sessions`] : [];
      return `${[...said, ...rest].join("; ") || "No session"}.`;
    },
  };

  const PICTURES = { engine, paged, prefix: paged, blocks, contiguous, quantized, tiered, buffers, pooled };

  // The objects to show: all that have a picture, or, if there are more than three, only the one of the last call.
  function shown(world) {
    const spoken = world.objects.get(world.last), main = spoken?.family === "buffer" ? spoken.pool : world.last;
    const all = [...world.objects.values()].filter((object) => object.family in PICTURES);
    return all.length <= 3 ? all : all.filter((object) => object.id === main);
  }

  function draw(world, names) {
    return shown(world).map((object) => {
      const title = element("p", "kv-title", names.get(object.id) ?? object.family);
      return element("div", "kv-object", title, ...PICTURES[object.family].draw(object, world));
    });
  }

  function describe(world, names) {
    return shown(world).map((object) => {
      const words = PICTURES[object.family].describe(object);
      return shown(world).length > 1 ? `${names.get(object.id)}: ${words}` : words;
    }).join(" ");
  }

  Object.assign(window.kvref, { PICTURES, box, cell, describe, draw, element, hue, listed, many, mark, more, row, span });
})();
