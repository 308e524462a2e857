"""OpenVINO GenAI with a canary: three concurrent prompts, with and without prompt lookup, and with and without room for all."""

import openvino as ov
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

from kvref.canary import Canary
from kvref_adapters.openvino_genai.adapter import llama_graph

ov.save_model(llama_graph(Canary()), "openvino_model.xml", compress_to_fp16=False)
words = [[start + number % 48 for number in range(112)] for start in (4, 64, 124)]  # a period, repeated
for lookup, blocks in ((5, 40), (0, 8), (5, 8)):
    scheduled, asked = SchedulerConfig(), GenerationConfig(max_new_tokens=60, ignore_eos=True, eos_token_id=2)
    scheduled.num_kv_blocks, asked.num_assistant_tokens, asked.max_ngram_size = blocks, lookup, lookup
    pipeline = ContinuousBatchingPipeline(".", scheduled, "CPU", {"prompt_lookup": lookup > 0})
    found = pipeline.generate([ov.Tensor([[1, *each[:52]]]) for each in words], [asked] * 3)
    for each, said in zip(words, found, strict=True):
        right = [one == other for one, other in zip(each[52:], said.m_generation_ids[0], strict=True)]
        print(lookup, blocks, sum(right), "of 60 right")
