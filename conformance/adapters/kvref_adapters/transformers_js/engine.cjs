// transformers.js as a server of JSON lines, one reply per request:
// {"load": FOLDER} returns {"model": NUMBER}, and
// {"model": NUMBER, "prompts": [[TOKEN, ...], ...], "count": COUNT} returns {"said": [[TOKEN, ...], ...]}; with "cache": NAME
// the cache is kept under that name and reused; {"copy": NAME, "to": NAME} and {"forget": NAME} return {}; an error returns
// {"error": MESSAGE}. A CommonJS file, because Node uses NODE_PATH only for these.

const { dirname, basename } = require("node:path");
const { createInterface } = require("node:readline");
const { AutoModelForCausalLM, DynamicCache, Tensor, env } = require("@huggingface/transformers");

const PADDING = 0; // any token, because it is masked
const models = [];
const caches = new Map();

async function load(folder) {
  env.allowRemoteModels = false;
  env.localModelPath = dirname(folder);
  const options = { dtype: "fp32", device: "cpu", session_options: { intraOpNumThreads: 1 } };
  models.push(await AutoModelForCausalLM.from_pretrained(basename(folder), options));
  return { model: models.length - 1 };
}

async function complete({ model, prompts, count, cache }) {
  const longest = Math.max(...prompts.map((prompt) => prompt.length));
  const row = (prompt, missing, there) => [...Array(longest - prompt.length).fill(missing), ...prompt.map(there)];
  const tensor = (rows) => new Tensor("int64", rows.flat().map(BigInt), [prompts.length, longest]);
  const sequences = await models[model].generate({
    inputs: tensor(prompts.map((prompt) => row(prompt, PADDING, (token) => token))),
    attention_mask: tensor(prompts.map((prompt) => row(prompt, 0, () => 1))),
    max_new_tokens: count,
    do_sample: false,
    ...(cache === undefined ? {} : { past_key_values: kept(cache) }),
  });
  return { said: sequences.tolist().map((tokens) => tokens.slice(longest).map(Number)) };
}

function kept(name) {
  if (!caches.has(name)) caches.set(name, new DynamicCache());
  return caches.get(name);
}

async function answer(request) {
  if ("load" in request) return load(request.load);
  if ("prompts" in request) return complete(request);
  if ("copy" in request) caches.set(request.to, new DynamicCache({ ...kept(request.copy) }));
  if ("forget" in request) caches.delete(request.forget);
  return {};
}

(async () => {
  for await (const line of createInterface({ input: process.stdin })) {
    const said = await answer(JSON.parse(line)).catch((error) => ({ error: String(error) }));
    process.stdout.write(JSON.stringify(said) + "\n");
  }
})();
