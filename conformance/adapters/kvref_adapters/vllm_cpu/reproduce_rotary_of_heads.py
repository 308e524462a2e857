"""vLLM on a CPU with a canary of LFM2: with `enforce_eager`, heads are rotated by wrong positions, and tokens are wrong."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from pathlib import Path

import torch
from vllm import LLM, SamplingParams, _custom_ops

from kvref.canary.hybrid import continued_text
from kvref_canary.files import huggingface
from kvref_canary.files.hybrid import make_hybrid_files

# The operator alone: it rotates all heads by 0.1 per position, so that each head shows by which position it was rotated.
angles = torch.arange(30)[:, None] * torch.full((32,), 0.1)
cache, positions = torch.cat([angles.cos(), angles.sin()], dim=-1), torch.tensor([10, 20])
for title, shape in (("[tokens, heads * head_size]", (2, 256)), ("[tokens, heads, head_size]", (2, 4, 64))):
    query = torch.tensor([1.0, 0.0]).repeat_interleave(32).repeat(2, 4).reshape(shape)
    _custom_ops.rotary_embedding(positions, query, query.clone(), 64, cache, True)
    rotated = query.reshape(2, 4, 64)
    print(
        f"{title}: positions {positions.tolist()}, heads rotated by",
        torch.atan2(rotated[..., 32], rotated[..., 0]).div(0.1).tolist(),
    )

huggingface.write_folder(Path("canary"), make_hybrid_files("lfm2", "float32"))
text = continued_text("lfm2", 0, 160)
for title, operators in (("by default", []), ("without the operator", ["-rotary_embedding"])):
    model = LLM(
        "canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, compilation_config={"custom_ops": operators}
    )
    asked = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    (answer,) = model.generate([{"prompt_token_ids": text[:100]}], asked, use_tqdm=False)
    wrong = sum(token != right for token, right in zip(answer.outputs[0].token_ids, text[100:], strict=True))
    print(f"{title}: {wrong} of 60 tokens are wrong")
    del model
