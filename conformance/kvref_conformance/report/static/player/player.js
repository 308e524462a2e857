// <kv-player>: steps through a trace. The trace is in a <script type="application/jsonl"> inside the element, or is opened from a
// file. With the attribute `opens`, the element has a button to open a file, and accepts dropped files.
"use strict";

(() => {
  const { TraceError, call, isArray, namesOf, numbers, outcome, parse, parting, short } = window.kvref;
  const { Worlds, describe, draw, element } = window.kvref;
  const NEARBY = 4; // calls listed before and after the current one
  const ROWS = 6, COLUMNS = 8; // the part of an array that is shown
  const LARGEST = 2 ** 28; // maximum bytes of a file

  const SIGNS = { // SVG paths, because not every font has these characters
    start: "M3 3v10M13 3 6 8l7 5z", back: "M10 3 5 8l5 5", play: "M4 3l9 5-9 5z", pause: "M5 3v10M11 3v10",
    forward: "M6 3l5 5-5 5", end: "M13 3v10M3 3l7 5-7 5z",
  };
  const sign = (name) => {
    const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS(drawn.namespaceURI, "path");
    drawn.setAttribute("viewBox", "0 0 16 16");
    drawn.setAttribute("aria-hidden", "true");
    path.setAttribute("d", SIGNS[name]);
    drawn.append(path);
    return drawn;
  };

  let players = 0;

  class Player extends HTMLElement {
    connectedCallback() {
      if (this.ready) return;
      this.ready = true;
      this.number = ++players;
      this.trouble = element("p", "kv-trouble");
      this.trouble.setAttribute("role", "alert");
      this.body = element("div", "kv-body");
      const source = this.querySelector("script");
      this.append(this.trouble, ...(this.hasAttribute("opens") ? [this.opener()] : []), this.body);
      if (source) this.load(source.textContent.trim());
    }

    disconnectedCallback() {
      this.pause();
    }

    // Show a trace from its text, at its first mismatch or else at its first call. name: the name of an opened file, or "" for the
    // trace of the page. If the text cannot be read, show the error and keep the current trace.
    load(text, name = "") {
      this.trouble.textContent = "";
      let trace;
      try {
        trace = parse(text);
      } catch (error) {
        if (!(error instanceof TraceError)) throw error;
        this.trouble.textContent = `${name ? `${name}: ` : ""}${error.message}`;
        return;
      }
      this.pause();
      this.trace = trace;
      this.names = namesOf(trace.exchanges);
      this.worlds = new Worlds(trace);
      this.parting = parting(trace);
      this.body.replaceChildren(this.heading(name ? null : this.getAttribute("label")), this.controls(), ...this.panels());
      this.go(this.parting ? this.parting.step + 1 : 1);
    }

    heading(story) {
      const { clause, check, implementation } = this.trace.header;
      const title = story ?? `${clause === "any" ? "" : `${clause} · `}${check}`;
      const who = story ? null : element("span", "kv-quiet", `${implementation?.name ?? "?"} ${implementation?.version ?? ""}`);
      this.setAttribute("role", "group");
      this.setAttribute("aria-label", `Player: ${title}`);
      return element("p", "kv-heading", element("strong", "", title), " ", who);
    }

    controls() {
      const button = (label, name, act) => {
        const made = element("button", `kv-button kv-${name}`, sign(name));
        made.type = "button";
        made.setAttribute("aria-label", label);
        made.title = label;
        made.addEventListener("click", act);
        return made;
      };
      this.playing = button("Play", "play", () => (this.timer ? this.pause() : this.play()));
      this.slider = element("input", "kv-slider");
      Object.assign(this.slider, { type: "range", min: 0, max: this.trace.exchanges.length, step: 1, value: 0 });
      this.slider.setAttribute("aria-label", "Step");
      this.slider.addEventListener("input", () => {
        this.pause();
        this.go(Number(this.slider.value));
      });
      this.count = element("span", "kv-count");
      const by = (steps) => () => {
        this.pause();
        this.go(this.step + steps);
      };
      const made = element("div", "kv-controls",
        button("To the start", "start", by(-Infinity)), button("One step back", "back", by(-1)), this.playing,
        button("One step forward", "forward", by(1)), button("To the end", "end", by(Infinity)), this.slider, this.count);
      made.addEventListener("keydown", (event) => this.key(event));
      return made;
    }

    panels() {
      this.note = element("p", "kv-note");
      this.line = element("p", "kv-call");
      this.failure = element("div", "kv-failure");
      this.picture = element("div", "kv-picture");
      this.picture.setAttribute("role", "img");
      this.words = element("p", "kv-words");
      const live = element("div", "kv-live", this.note, this.line, this.failure);
      live.setAttribute("aria-live", "polite");
      this.words.setAttribute("aria-live", "polite");
      this.values = element("div", "kv-values");
      this.list = element("ol", "kv-list");
      const calls = element("details", "kv-details", element("summary", "", "The calls around this one"), this.list);
      const values = element("details", "kv-details", element("summary", "", "The numbers of this call"), this.values);
      values.open = this.hasAttribute("opens");
      calls.open = this.hasAttribute("opens");
      return [live, this.picture, this.words, values, calls];
    }

    key(event) {
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
      if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.pause();
      this.go(this.step + moves[event.key]);
    }

    play() {
      if (this.step === this.trace.exchanges.length) this.go(0);
      this.show("Pause", "pause");
      const next = () => {
        this.go(this.step + 1);
        if (this.step === this.trace.exchanges.length) this.pause();
        else this.timer = setTimeout(next, this.time());
      };
      this.timer = setTimeout(next, 300);
    }

    time() { // milliseconds per step: long enough to read its note
      return 900 + 45 * this.note.textContent.length;
    }

    pause() {
      clearTimeout(this.timer);
      this.timer = null;
      if (this.playing) this.show("Play", "play");
    }

    show(label, name) {
      this.playing.replaceChildren(sign(name));
      this.playing.title = label;
      this.playing.setAttribute("aria-label", label);
    }

    // Show the state after `step` exchanges.
    go(step) {
      const { exchanges } = this.trace;
      this.step = Math.min(exchanges.length, Math.max(0, step));
      const exchange = exchanges[this.step - 1];
      const parts = this.parting && exchange && this.parting.step === this.step - 1;
      this.slider.value = this.step;
      const where = exchange ? `${this.step} of ${exchanges.length}: ${exchange.request.op}` : "Before the first call";
      this.slider.setAttribute("aria-valuetext", where);
      this.count.textContent = `${this.step} / ${exchanges.length}`;
      this.note.textContent = exchange?.request.note ?? (exchange ? "" : this.before());
      const code = (text) => element("code", "", text);
      this.line.replaceChildren(...(exchange ? [code(call(exchange, this.names)), " → ", code(outcome(exchange.reply))] : []));
      this.failure.replaceChildren(...(parts ? this.failed(exchange) : []));
      const [drawn, words] = this.drawn();
      this.picture.replaceChildren(...drawn);
      this.picture.hidden = !drawn.length;
      this.values.parentElement.open ||= !drawn.length; // without a picture, show the numbers
      this.words.textContent = words;
      this.picture.setAttribute("aria-label", words || "No objects yet");
      this.values.replaceChildren(...(exchange ? this.arrays(exchange) : []));
      this.list.replaceChildren(...this.nearby());
    }

    // The picture of this step and its description, or only a message: a file may contain a wrong layer, or a billion blocks.
    drawn() {
      try {
        const world = this.worlds.at(this.step);
        return [draw(world, this.names), describe(world, this.names)];
      } catch (error) {
        if (!(error instanceof TypeError || error instanceof RangeError)) throw error;
        return [[], "No picture: a call up to here has arguments that cannot be drawn."];
      }
    }

    before() {
      const calls = this.trace.exchanges.length, fails = this.parting ? `; first mismatch at step ${this.parting.step + 1}` : "";
      return `${calls} call${calls === 1 ? "" : "s"}${fails}. Press play, or step with the arrow keys.`;
    }

    failed(exchange) {
      const { what, expected, got } = this.parting, { cause } = this.trace.header.failed ?? {};
      const item = (name, text, className) =>
        element("div", className, element("dt", "", name), element("dd", "", element("code", "", text)));
      const { clause: about } = this.trace.header, clause = about === "any" ? exchange.reply.clause ?? about : about;
      return [element("p", "", element("strong", "", `First mismatch (${clause}, line ${exchange.line}): ${what}`)),
        element("dl", "", item("expected", expected, "kv-expected"), item("got", got, "kv-got"),
          ...(cause ? [item("cause", cause, "")] : [])),
        element("p", "kv-quiet", "The picture shows the correct state.")];
    }

    // The arrays of a call: its arguments, the expected result, and the actual result.
    arrays({ request, reply }) {
      const parts = Object.entries(request.args).flatMap(([name, value]) => named(name, value));
      const right = "ok" in reply ? named(reply.got ? "expected" : "reply", reply.ok) : [];
      const came = reply.got && "ok" in reply.got ? named("got", reply.got.ok) : [];
      const tables = [...parts, ...right, ...came].map(([name, array]) => {
        const other = right.find(([also]) => also === name.replace("got", "expected"));
        return table(name, array, name.startsWith("got") && other ? other[1] : null);
      });
      return tables.length ? tables : [element("p", "kv-quiet", "No arrays.")];
    }

    nearby() {
      const { exchanges } = this.trace, first = Math.max(0, Math.min(this.step - 1 - NEARBY, exchanges.length - 2 * NEARBY - 1));
      this.list.start = first + 1;
      return exchanges.slice(first, first + 2 * NEARBY + 1).map((exchange, index) => {
        const step = first + index + 1, made = element("button", "kv-step", element("code", "", call(exchange, this.names)));
        made.type = "button";
        if (step === this.step) made.setAttribute("aria-current", "step");
        if (this.parting?.step === step - 1) made.append(element("span", "kv-parts", " first mismatch"));
        made.addEventListener("click", () => {
          this.pause();
          this.go(step);
        });
        return element("li", "", made);
      });
    }

    opener() {
      const input = element("input", "kv-file");
      Object.assign(input, { type: "file", accept: ".jsonl,.json,.txt", id: `kv-file-${this.number}` });
      input.addEventListener("click", () => {
        input.value = ""; // otherwise opening the same file again, after it changed, would fire no event
      });
      input.addEventListener("change", () => this.open(input.files[0]));
      this.addEventListener("dragover", (event) => event.preventDefault());
      this.addEventListener("drop", (event) => {
        event.preventDefault();
        this.open(event.dataTransfer.files[0]);
      });
      const label = element("label", "", "Open a trace, or drop it here: ", input);
      return element("p", "kv-opener", label);
    }

    async open(file) {
      if (!file) return;
      if (file.size > LARGEST) this.trouble.textContent = `${file.name}: larger than ${LARGEST / 2 ** 20} MiB`;
      else this.load(await file.text(), file.name);
    }
  }

  // The arrays in a value, with their names.
  function named(name, value) {
    if (isArray(value)) return [[name, value]];
    return Array.isArray(value) ? value.flatMap((part, index) => named(`${name} ${index}`, part)) : [];
  }

  // An array as a table of its rows. Numbers that differ from `other` are marked.
  function table(name, array, other) {
    const width = array.shape.length ? array.shape.at(-1) : 1, values = numbers(array), rights = other ? numbers(other) : null;
    const rows = width ? values.length / width : 0;
    const body = Array.from({ length: Math.min(rows, ROWS) }, (_, index) => {
      const cells = values.slice(index * width, index * width + Math.min(width, COLUMNS)).map((number, column) => {
        const same = !rights || Object.is(number, rights[index * width + column]);
        return element("td", same ? "" : "kv-wrong", short(number, array.dtype));
      });
      return element("tr", "", ...cells, ...(width > COLUMNS ? [element("td", "", "…")] : []));
    });
    const more = rows > ROWS ? ` (the first ${ROWS} of ${rows} rows)` : "";
    const caption = element("caption", "", `${name}: ${array.dtype} [${array.shape.join(", ")}]${more}`);
    return element("div", "kv-array", element("table", "", caption, element("tbody", "", ...body)));
  }

  customElements.define("kv-player", Player);
})();
