"""KerasHub and transformers, tiny random models with windows of 4: the difference of the hidden states per token."""

import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras_hub
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "sliding_window": 4, "tie_word_embeddings": False, "attn_implementation": "eager",
}  # fmt: skip
ALL = {"use_sliding_window": True, "max_window_layers": 0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def without_experts(folder):
    """KerasHub reads experts only as MXFP4. Experts of zeros add nothing in either library: only attention is compared."""
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".experts." not in name}
    for layer in range(2):
        for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
            path = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{path}_blocks"] = torch.zeros(2, rows, 1, 16, dtype=torch.uint8)
            tensors[f"{path}_scales"] = torch.full((2, rows, 1), 127, dtype=torch.uint8)
            tensors[f"{path}_bias"] = torch.zeros(2, rows)
    save_file(tensors, file, {"format": "pt"})


def off(model, ours):
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected = model.model(tokens).last_hidden_state.numpy()
        got = ours({"token_ids": tokens.numpy(), "padding_mask": np.ones((1, 12), np.int32)}).numpy()
    return [f"{each:.2f}" for each in np.abs(expected - got).max((0, 2))]


for name, model, backbone in (
    ("Qwen2", Qwen2ForCausalLM(Qwen2Config(**SIZES, **ALL)), keras_hub.models.QwenBackbone),
    ("Qwen3", Qwen3ForCausalLM(Qwen3Config(**SIZES, **ALL, head_dim=16)), keras_hub.models.Qwen3Backbone),
    (
        "GPT-OSS",
        GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=2, rope_parameters=ROPE)),
        keras_hub.models.GptOssBackbone,
    ),
):
    torch.manual_seed(0)
    for key, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.0 if ".experts." in key else 0.3)
    with tempfile.TemporaryDirectory() as folder:
        model.eval().save_pretrained(folder)
        if name == "GPT-OSS":
            without_experts(Path(folder))
        ours = backbone.from_preset(folder, dtype="float32")
    print(name, model.config.layer_types, "with windows of 4: differences")
    windows = [getattr(layer, "sliding_window", getattr(layer, "sliding_window_size", None)) for layer in ours.transformer_layers]
    print("  with KerasHub's windows", windows, *off(model, ours))
    if name == "GPT-OSS":
        for windows in ([4, None], [3, None]):
            for layer, window in zip(ours.transformer_layers, windows, strict=True):
                layer.self_attention_layer.sliding_window = window
            print("  with windows of", windows, *off(model, ours))
