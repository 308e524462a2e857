// The state of the objects of a trace after each exchange: block tables, free blocks, tiers. A trace contains only calls and
// replies, so the state is derived from them according to the specification. Which block a cache chose is derived from its
// replies, including later ones.
"use strict";

(() => {
  const { FAMILIES, done, numbers, isArray } = window.kvref;
  const SNAPSHOT = 256; // steps between two stored states
  const INVENTED = 2 ** 21; // the first invented block number: larger than those of any pool that can be drawn

  // The states of a trace: at(0) is before the first exchange, at(k) after exchange k, counted from 1.
  class Worlds {
    constructor(trace) {
      this.exchanges = trace.exchanges;
      this.replies = new Map(trace.exchanges.map(({ request, reply }) => [request.id, reply.ok]));
      this.tokenHits = hasTokenHits(trace);
      this.known = this.learned();
      this.kept = new Map([[0, start()]]);
    }

    at(step) {
      let from = step - (step % SNAPSHOT);
      while (!this.kept.has(from)) from -= SNAPSHOT;
      const world = structuredClone(this.kept.get(from));
      for (let now = from + 1; now <= step; now++) {
        this.apply(world, this.exchanges[now - 1], (place) => this.known.get(place), Object.is);
        if (now % SNAPSHOT === 0) this.kept.set(now, structuredClone(world));
      }
      return world;
    }

    value(argument) { // an argument with references replaced by results, and scalar arrays by numbers
      if (Array.isArray(argument)) return argument.map((part) => this.value(part));
      if (isArray(argument) && argument.shape.length === 0) return numbers(argument)[0];
      if (/^-?\d+$/.test(argument?.number)) return BigInt(argument.number);
      return argument?.reply === undefined ? argument : this.replies.get(argument.reply);
    }

    // Apply an exchange to a world. block: returns the number of the block that the exchange put at a place of a table, if known.
    // same: whether a block number equals the one in a reply.
    apply(world, { request, reply, family, name }, block, same) {
      world.touched = new Map();
      world.last = request.on ?? request.id;
      if (!done(reply) || !(family in FAMILIES)) return;
      const args = Object.fromEntries(Object.entries(request.args).map(([key, value]) => [key, this.value(value)]));
      const touch = (kind, ...place) => world.touched.set(place.join("/"), kind);
      const context = { world, reply, args, touch, same, tokenHits: this.tokenHits, id: request.id, file: request.args.data?.reply,
        on: request.on, answer: answer(reply), block: (...place) => block([request.id, ...place].join("/")) };
      if (name === "new") {
        world.objects.set(request.id, { id: request.id, family, ...FAMILIES[family].new(args) });
        return;
      }
      const object = world.objects.get(request.on);
      if (object && name in FAMILIES[family]) FAMILIES[family][name](object, args, context);
    }

    // The block that each request put at each place of a table, according to the first reply that contains it. To find out which
    // place a reply refers to, the tables are filled once with invented numbers.
    learned() {
      const known = new Map(), invented = new Map(), world = start();
      const block = (place) => {
        const number = INVENTED + invented.size;
        invented.set(number, place);
        return number;
      };
      const same = (number, answered) => {
        const place = invented.get(number);
        if (place !== undefined && !known.has(place)) known.set(place, answered);
        return (known.get(place) ?? number) === answered;
      };
      try {
        for (const exchange of this.exchanges) {
          if (TABLED.includes(exchange.family)) this.apply(world, exchange, block, same);
        }
      } catch (error) {
        if (!(error instanceof TypeError || error instanceof RangeError)) throw error; // these two are reported when drawing
      }
      return known;
    }
  }

  const TABLED = ["paged", "prefix"];

  // Whether hits end inside blocks (PREFIX-19): kvref's name for this choice, or a hit in a reply says it.
  function hasTokenHits({ header, exchanges }) {
    const sizes = new Map(exchanges.map(({ request }) => [request.id, request.args.block_size]));
    return Boolean(header.implementation?.load?.endsWith(":token-hits"))
      || exchanges.some(({ request, reply }) => request.op === "prefix.match" && reply.ok % sizes.get(request.on) > 0);
  }
  const start = () => ({ objects: new Map(), touched: new Map(), saved: new Map(), last: null });

  function answer({ ok, got, failed }) { // the integers in a correct reply, or undefined
    if (got || failed) return undefined;
    return isArray(ok) ? numbers(ok) : Array.isArray(ok) ? ok : undefined;
  }

  window.kvref.Worlds = Worlds;
})();
