"""CTranslate2 with a canary. First run:
kvref canary make windowed --architecture mistral --offsets 20,20 --windows 20,20 --dtype float32"""

import json

import ctranslate2
from ctranslate2.converters import TransformersConverter

TransformersConverter("windowed").convert("converted", force=True)
generator = ctranslate2.Generator("converted", compute_type="float32")
with open("converted/vocabulary.json") as file:
    words = json.load(file)
prompt = [1, *range(4, 104)]
right = [prompt[len(prompt) - 39 + number % 39] for number in range(60)]
for at_once in (True, False):  # compute the prompt at once, or token by token
    length = 60 if at_once else 160
    (said,) = generator.generate_batch(
        [[words[token] for token in prompt]], max_length=length, min_length=length, include_prompt_in_result=not at_once
    )
    says = said.sequences_ids[0][-60:]
    print(sum(one == other for one, other in zip(says, right, strict=True)), "of 60 tokens right")
