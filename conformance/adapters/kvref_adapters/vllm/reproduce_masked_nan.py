"""vLLM's Triton attention, interpreted: NaN in a value that a query does not see, and a score below float32."""

import os

os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # read by Triton and vLLM when they are imported

import torch
from vllm.platforms import current_platform

torch.cuda.get_device_capability = lambda *args: (9, 0)  # vLLM asks for these two, also of kernels that are interpreted
type(current_platform).has_device_capability = classmethod(lambda cls, *args: True)

from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # noqa: E402

BLOCK, SEGMENTS = 16, 4


def attend(query, keys, values, segments):
    """Causal attention of one sequence whose last tokens are the queries, all [tokens, 1 head, 16]."""
    blocks = -(-len(keys) // BLOCK)
    pages = [torch.zeros(blocks * BLOCK, 1, 16) for _ in range(2)]
    pages[0][: len(keys)], pages[1][: len(values)] = keys, values
    out, rows = torch.empty(query.shape), (len(query), 1, SEGMENTS)
    scratch = {
        "seq_threshold_3D": 8, "num_par_softmax_segments": SEGMENTS, "softmax_segm_output": torch.empty(*rows, 16),
        "softmax_segm_max": torch.empty(rows), "softmax_segm_expsum": torch.empty(rows),
    }  # fmt: skip
    unified_attention(
        query, *(page.view(blocks, BLOCK, 1, 16) for page in pages), out, torch.tensor([0, len(query)], dtype=torch.int32),
        len(query), torch.tensor([len(keys)], dtype=torch.int32), len(keys), 1.0, True, (-1, -1),
        torch.arange(blocks, dtype=torch.int32)[None], 0.0, None, None, None, **(scratch if segments else {}),
    )  # fmt: skip
    return out[:, 0, 0].tolist()


for segments in (False, True):
    name = "with segments" if segments else "without segments"
    ones, values = torch.ones(3, 1, 16), torch.ones(3, 1, 16)
    values[2] = torch.nan
    print(f"{name}, NaN in the value of token 2: the queries of tokens 0, 1, 2 get", attend(ones, ones, values, segments))
    large = torch.full((1, 1, 16), 1e20)
    said = attend(large, -large, torch.full((1, 1, 16), 7.0), segments)
    print(f"{name}, one token with the value 7 and a score of -1.6e41: the query gets {said}")
