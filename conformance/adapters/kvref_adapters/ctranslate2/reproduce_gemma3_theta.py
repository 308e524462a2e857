"""CTranslate2 converts a Gemma 3 canary of transformers 5 with a theta of 10,000 in all layers. First run:
kvref canary make gemma --architecture gemma3 --offsets 16,31 --windows 16,none --dtype float32"""

import struct

from ctranslate2.converters import TransformersConverter
from transformers import AutoConfig

config = AutoConfig.from_pretrained("gemma")
print(hasattr(config, "rope_theta"), config.rope_parameters)
TransformersConverter("gemma").convert("converted", force=True)
with open("converted/model.bin", "rb") as file:
    data = file.read()
for layer in (0, 1):
    name = f"layer_{layer}/self_attention/rotary_base".encode()
    at = data.index(name) + len(name) + 7  # after the end of the name, the rank, the type and the size
    print("layer", layer, struct.unpack("<f", data[at : at + 4]))
