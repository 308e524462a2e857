"""mlx-lm's Falcon-H1: which multipliers are applied to the attention weights of a checkpoint, as `Model.sanitize` loads it."""

import mlx.core as mx
from mlx_lm.models.falcon_h1 import Model, ModelArgs

mx.set_default_device(mx.cpu)
model = Model(ModelArgs(num_hidden_layers=1, attention_in_multiplier=0.5, key_multiplier=0.25))
layer = "model.layers.0"
convolution = {f"{layer}.mamba.conv1d.weight": mx.ones((8, 1, 4))}  # in the layout of a checkpoint
for projection, expected in (("q_proj", 0.5), ("k_proj", 0.5 * 0.25), ("v_proj", 0.5)):
    name = f"{layer}.self_attn.{projection}.weight"
    loaded = model.sanitize(convolution | {name: mx.ones((1, 1))})[name].item()
    print(f"{projection}: the weights are multiplied by {loaded}, and by {expected} in the code of transformers")
