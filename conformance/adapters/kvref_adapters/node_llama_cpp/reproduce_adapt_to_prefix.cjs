// node-llama-cpp with any GGUF file: node reproduce_adapt_to_prefix.cjs "$PWD/canary.gguf"

const { pathToFileURL } = require("node:url");

(async () => {
  const { getLlama } = await import(pathToFileURL(require.resolve("node-llama-cpp")));
  const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
  const model = await llama.loadModel({ modelPath: process.argv[2] });
  const context = await model.createContext({ contextSize: 256, sequences: 1 });
  const sequence = context.getSequence();
  for (const allowShift of [true, false]) {
    await sequence.clearHistory();
    await sequence.evaluateWithoutGeneratingNewTokens([1, 9, 16, 23, 30]);
    await sequence.adaptStateToTokens([1, 9, 16], allowShift);
    console.log(allowShift, sequence.nextTokenIndex, sequence.contextTokens); // true, the default: 5 tokens; false: 3
  }
  process.exit(0);
})();
