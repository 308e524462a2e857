// node-llama-cpp as a server of JSON lines, one reply per request:
// {"load": FILE, "canary": NAME, "context": TOKENS, "sequences": COUNT, "drafts": BOOLEAN} returns {"model": NUMBER}, the same
// for the same canary, whose sequences keep their tokens, and
// {"model": NUMBER, "prompts": [[TOKEN, ...], ...], "count": COUNT} returns
// {"said": [[TOKEN, ...], ...], "accepted": COUNT, "rejected": COUNT}, where the counts are of all drafted tokens so far; an error
// returns {"error": MESSAGE}. The package is an ES module, for which Node does not use NODE_PATH; its path is resolved here.

const { createInterface } = require("node:readline");
const { pathToFileURL } = require("node:url");

const models = [];
const loaded = new Map(); // numbers of models by canary and drafts

async function load({ load: modelPath, context: contextSize, sequences, drafts, canary }) {
  const name = `${canary} ${drafts}`;
  if (loaded.has(name)) return { model: loaded.get(name) };
  const { getLlama, InputLookupTokenPredictor } = await import(pathToFileURL(require.resolve("node-llama-cpp")));
  const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, logLevel: "error", maxThreads: 1 });
  const model = await llama.loadModel({ modelPath });
  const context = await model.createContext({ contextSize, sequences, threads: 1 });
  const drafted = () => (drafts ? { tokenPredictor: new InputLookupTokenPredictor({ patternLength: { min: 1 } }) } : {});
  models.push(Array.from({ length: sequences }, () => context.getSequence(drafted())));
  loaded.set(name, models.length - 1);
  return { model: models.length - 1 };
}

// The sequences whose tokens have the longest common prefix with each prompt, each sequence at most once.
function chosen(sequences, prompts) {
  const free = new Set(sequences);
  return prompts.map((prompt) => {
    const common = (sequence) => sequence.compareContextTokens(prompt).firstDifferentIndex;
    const best = [...free].reduce((a, b) => (common(b) > common(a) ? b : a));
    free.delete(best);
    return best;
  });
}

// The prompt with every seventh token replaced by the one before it, so that some drafts are rejected.
function misremembered(prompt) {
  return prompt.map((token, at) => (at % 7 === 6 ? prompt[at - 1] : token));
}

async function generate(sequence, prompt, count) {
  await sequence.adaptStateToTokens(prompt.slice(0, -1), false); // keeps the common prefix only
  const said = [];
  if (count === 0) return said;
  sequence.tokenPredictor?.updateInputTokens(misremembered(prompt));
  for await (const token of sequence.evaluate(prompt.slice(sequence.nextTokenIndex), { temperature: 0, yieldEogToken: true })) {
    said.push(token);
    if (said.length === count) break;
  }
  return said;
}

async function complete({ model, prompts, count }) {
  const said = [];
  const sequences = models[model];
  for (let start = 0; start < prompts.length; start += sequences.length) {
    const group = prompts.slice(start, start + sequences.length);
    const own = chosen(sequences, group);
    said.push(...(await Promise.all(group.map((prompt, at) => generate(own[at], prompt, count)))));
  }
  const drafts = sequences.map((sequence) => sequence.tokenPredictions);
  const sum = (kind) => drafts.reduce((total, each) => total + each[kind], 0);
  return { said, accepted: sum("validated"), rejected: sum("refuted") };
}

(async () => {
  for await (const line of createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    const said = await ("load" in request ? load(request) : complete(request)).catch((error) => ({ error: String(error) }));
    process.stdout.write(JSON.stringify(said) + "\n");
  }
})();
