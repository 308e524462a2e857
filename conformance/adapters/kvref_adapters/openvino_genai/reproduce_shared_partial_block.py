"""OpenVINO GenAI with a canary: a prompt that ends within a block, then two concurrent requests that begin with it."""

import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from kvref.canary import Oracle, sized
from kvref_adapters.openvino_genai.adapter import llama_graph

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=32)
ov.save_model(llama_graph(canary), "openvino_model.xml", compress_to_fp16=False)
asked, begun = GenerationConfig(max_new_tokens=1, ignore_eos=True, eos_token_id=2), [1, *range(4, 44)]
for precision, caching in [(each, on) for each in (ov.Type.f32, ov.Type.f16, ov.Type.u8) for on in (False, True)]:
    options, wrong = {"KV_CACHE_PRECISION": precision, "INFERENCE_PRECISION_HINT": ov.Type.f32}, 0
    scheduled = SchedulerConfig()
    scheduled.num_kv_blocks, scheduled.enable_prefix_caching = 40, caching
    pipeline = ContinuousBatchingPipeline(".", scheduled, "CPU", options)
    both = [[*begun, *range(60, 72)], [*begun, *range(80, 84)]]
    pipeline.generate([ov.Tensor([begun])], [asked])
    for _ in range(32):
        found = pipeline.generate([ov.Tensor([each]) for each in both], [asked, asked])
        due = [Oracle(canary).extend(each)[-1] for each in both]
        wrong += sum(each.m_generation_ids[0] != [token] for each, token in zip(found, due, strict=True))
        both = [[*each, token] for each, token in zip(both, due, strict=True)]
    print(precision, caching, wrong, "of 64 tokens wrong")
