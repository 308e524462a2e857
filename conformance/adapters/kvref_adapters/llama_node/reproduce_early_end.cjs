// llama.node with a small GGUF file, such as a canary: node reproduce_early_end.cjs "$PWD/canary.gguf". First, `kvref canary make
// canary --gguf canary.gguf`. The more other programs run, the sooner it happens.

const { loadModel } = require("@fugood/llama.node");

(async () => {
  const context = await loadModel({ model: process.argv[2], n_ctx: 1024, n_threads: 1, n_gpu_layers: 0 });
  for (let count = 0, failed = 0; count < 10000 && failed < 3; count++) {
    try {
      await context.completion({ prompt: "puvo gora", n_predict: 1, temperature: 0 }); // one at a time
    } catch (error) {
      console.error(`\n${count}: ${error}`); // TypeError: Another completion is in progress; so are all later ones
      failed += 1;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  process.exit(0);
})();
