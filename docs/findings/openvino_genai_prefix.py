"""OpenVINO GenAI over a canary: a prompt of half a block, then two together that begin with it."""

import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from kvref.canary import Canary
from kvref_conformance.implementations.engines.openvino_llama import model

ov.save_model(model(Canary(offsets=(4, 7))), "openvino_model.xml", compress_to_fp16=False)
words = [1, *(4 + number % 12 for number in range(60))]  # a period, again and again
asked = GenerationConfig(max_new_tokens=1, ignore_eos=True, eos_token_id=2)
for precision in (ov.Type.f32, ov.Type.f16, ov.Type.u8):
    for caching in (False, True):
        scheduled = SchedulerConfig()
        scheduled.num_kv_blocks, scheduled.enable_prefix_caching = 40, caching
        options = {"KV_CACHE_PRECISION": precision, "INFERENCE_PRECISION_HINT": ov.Type.f32}
        pipeline = ContinuousBatchingPipeline(".", scheduled, "CPU", options)
        for lengths in ([16], [26, 18]):
            found = pipeline.generate([ov.Tensor([words[:length]]) for length in lengths], [asked] * len(lengths))
        print(precision, caching, found[0].m_generation_ids[0], "expected", [words[26]])
