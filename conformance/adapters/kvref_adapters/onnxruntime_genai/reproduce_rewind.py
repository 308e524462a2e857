"""onnxruntime-genai with a canary; first run: kvref canary make canary --dtype float32
python -m onnxruntime_genai.models.builder -i canary -o onnx -p fp32 -e cpu -c cache"""

import numpy as np
import onnxruntime_genai as og

model = og.Model("onnx")
params = og.GeneratorParams(model)
params.set_search_options(max_length=1024, do_sample=False)
generator = og.Generator(model, params)
generator.append_tokens(np.array([1, *range(4, 104)], np.int32))
for _ in range(60):
    generator.generate_next_token()
generator.rewind_to(101)
before = generator.token_count()
generator.generate_next_token()
print("one token was requested:", generator.token_count() - before, "were generated")
