"""onnxruntime-genai with a canary; first run: kvref canary make canary --dtype float32
python -m onnxruntime_genai.models.builder -i canary -o onnx -p fp32 -e cpu -c cache"""

import numpy as np
import onnxruntime_genai as og

model = og.Model("onnx")
params = og.GeneratorParams(model)
params.set_search_options(max_length=1024, do_sample=False)
talk, again = og.Generator(model, params), og.Generator(model, params)
talk.append_tokens(np.array([1, *range(4, 104)], np.int32))
for _ in range(5):
    talk.generate_next_token()
told = [*talk.get_sequence(0), 200]  # the prompt, the generated tokens, and the next turn
talk.append_tokens(np.array(told[-1:], np.int32))
again.append_tokens(np.array(told, np.int32))  # the same tokens at once
for generator in (talk, again):
    for _ in range(60):
        generator.generate_next_token()
print((talk.get_sequence(0) != again.get_sequence(0)).nonzero()[0] - len(told), "of 60 tokens differ")
