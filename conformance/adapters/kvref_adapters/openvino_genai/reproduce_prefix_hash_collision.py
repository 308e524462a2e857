"""OpenVINO GenAI with a canary: two prompts of different words whose first blocks (32 tokens on a CPU) have the same hash."""

from pathlib import Path

import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from kvref.canary import Canary
from kvref_adapters.openvino_genai.adapter import llama_graph

ov.save_model(llama_graph(Canary()), "openvino_model.xml", compress_to_fp16=False)
Path("generation_config.json").write_text('{"eos_token_id": 2}')
for caching in (False, True):
    scheduled = SchedulerConfig()
    scheduled.num_kv_blocks, scheduled.enable_prefix_caching = 40, caching
    pipeline = ContinuousBatchingPipeline(".", scheduled, "CPU")
    for words in ([76, 212, 73, 101, 256, 139, 156, 236], [63, 129, 139, 212, 235, 89, 29, 113]):
        prompt, asked = ov.Tensor([[1, *words, *range(4, 45)]]), GenerationConfig(max_new_tokens=7, ignore_eos=True)
        print(caching, words[1:], "generates", pipeline.generate([prompt], [asked])[0].m_generation_ids[0])
