// llama.node with any GGUF file: node reproduce_slots.cjs "$PWD/canary.gguf"; the figures are those of a canary, which
// `kvref canary make canary --gguf canary.gguf` makes.

const { loadModel } = require("@fugood/llama.node");

(async () => {
  const words = "puvo gora fino kahu wuhu raba gode huba tifi bavo";
  const asked = { model: process.argv[2], n_ctx: 2048, n_parallel: 2, n_threads: 1, n_gpu_layers: 0 };
  const context = await loadModel(asked);
  const alone = await context.completion({ prompt: words, n_predict: 1, temperature: 0 });
  await context.parallel.enable({ n_parallel: 2 }); // two slots of 1,024 tokens
  const started = (prompt, n_predict, heard) => context.parallel.completion({ prompt, n_predict, temperature: 0 }, heard);
  const slot = await (await started(words, 1)).promise;
  console.error(`\nprompt tokens: ${alone.timings.prompt_n} of completion, ${slot.timings.prompt_n} of parallel.completion`); // 11, 10

  let begun;
  const generating = new Promise((resolve) => (begun = resolve));
  const first = await started(words, 400, begun);
  await generating;
  const second = await started(`${words} `.repeat(140), 5); // 1,400 tokens: more than the slot has room for
  for (const { promise } of [first, second]) {
    const { text, tokens_predicted, stopped_limit, stopped_eos, context_full } = await promise;
    console.error({ words: text.trim().split(" ").length, tokens_predicted, stopped_limit, stopped_eos, context_full });
  } // a few words in place of 400, and an empty text; no error, and all three flags are false
  process.exit(0);
})();
