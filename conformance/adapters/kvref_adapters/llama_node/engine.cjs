// llama.node as a server of JSON lines, one reply per request:
// {"load": FILE, "canary": NAME, "context": TOKENS, "slots": COUNT} returns {"model": NUMBER}, the same for the same canary and
// number of slots; without slots, requests are computed in order in one sequence, which keeps its tokens;
// {"model": NUMBER, "prompts": [TEXT, ...], "count": COUNT, "states": [STATE, ...]} returns {"said": [TEXT, ...]}, where a state
// is {"load": FILE, "size": TOKENS, "save": FILE} or a part of it: before the completion, the first tokens of a file are loaded;
// {"model": NUMBER, "cancel": TEXT, "count": COUNT, "state": STATE} stops after half of the tokens, and returns {"heard": COUNT};
// an error returns {"error": MESSAGE}. The replies are written to descriptor 3, because the package prints its log to stdout.

const { writeSync } = require("node:fs");
const { createInterface } = require("node:readline");
const { loadModel, toggleNativeLog } = require("@fugood/llama.node");

const BATCH = 48; // tokens per batch of all slots, so that longer prompts are computed in several batches
const models = [];
const loaded = new Map(); // numbers of models by canary and slots

async function load({ load: model, context, slots, canary }) {
  const name = `${canary} ${slots}`;
  if (loaded.has(name)) return { model: loaded.get(name) };
  await toggleNativeLog(true); // llama.cpp's log goes to listeners, of which there are none
  const asked = { model, n_ctx: context * (slots || 1), n_parallel: slots || 1, n_batch: BATCH, n_threads: 1, n_gpu_layers: 0 };
  asked.ctx_shift = false;
  const made = await loadModel(asked);
  if (slots) await made.parallel.enable({ n_parallel: slots, n_batch: BATCH });
  models.push({ made, slots, asked });
  loaded.set(name, models.length - 1);
  return { model: models.length - 1 };
}

function options(prompt, count, state = {}) {
  const asked = { prompt, n_predict: count, temperature: 0 };
  if (state.load) asked.load_state_path = state.load;
  if (state.size) asked.load_state_size = state.size;
  if (state.save) asked.save_state_path = state.save;
  return asked;
}

// A completion in one sequence. If the context rejects all completions since one ended too early, the model is loaded again.
async function completion(model, ...asked) {
  try {
    return await model.made.completion(...asked);
  } catch (error) {
    if (!String(error).includes("Another completion is in progress")) throw error;
    model.made = await loadModel(model.asked);
    return await model.made.completion(...asked);
  }
}

async function complete({ model, prompts, count, states = [] }) {
  const { made, slots } = models[model];
  const said = [];
  if (slots) {
    const requests = prompts.map((prompt, at) => made.parallel.completion(options(prompt, count, states[at])));
    for (const request of requests) said.push((await (await request).promise).text);
  } else {
    for (const prompt of prompts) said.push((await completion(models[model], options(prompt, count))).text);
  }
  return { said };
}

async function cancel({ model, cancel: prompt, count, state }) {
  const { made, slots } = models[model];
  let heard = 0;
  let stop;
  const hear = () => {
    heard += 1;
    if (2 * heard >= count) stop();
  };
  if (slots) {
    const request = await made.parallel.completion(options(prompt, count, state), hear);
    stop = request.stop;
    await request.promise.catch(() => {}); // rejected if the request was cancelled
  } else {
    stop = () => models[model].made.stopCompletion();
    await completion(models[model], options(prompt, count), hear);
  }
  return { heard };
}

(async () => {
  for await (const line of createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    const answer = "load" in request ? load(request) : "cancel" in request ? cancel(request) : complete(request);
    writeSync(3, JSON.stringify(await answer.catch((error) => ({ error: String(error) }))) + "\n");
  }
})();
