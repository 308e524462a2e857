// transformers.js with a canary. First run `kvref canary make canary`, and write the result of
// kvref_adapters.transformers_js.engine.onnx_model(Canary()) to canary/onnx/model.onnx
const { AutoModelForCausalLM, DynamicCache, Tensor, env } = require("@huggingface/transformers");

async function turns(masked) {
  env.localModelPath = ".";
  const model = await AutoModelForCausalLM.from_pretrained("canary", { dtype: "fp32" });
  const past_key_values = new DynamicCache();
  let told = [1n, ...Array.from({ length: 60 }, (_, k) => BigInt(4 + k))];
  for (let turn = 0; turn < 3; turn++) {
    const inputs = new Tensor("int64", told, [1, told.length]);
    const mask = masked ? { attention_mask: new Tensor("int64", told.map(() => 1n), [1, told.length]) } : {};
    const said = await model.generate({ inputs, ...mask, past_key_values, max_new_tokens: 4, do_sample: false });
    told = said.tolist()[0];
    console.log(`of ${told.length} tokens ${past_key_values.get_seq_length()} are cached`);
  }
}
turns(true).then(() => turns(false)); // of 65, 69 and 73 tokens 64, 68, 72; and 64, 132, 204
