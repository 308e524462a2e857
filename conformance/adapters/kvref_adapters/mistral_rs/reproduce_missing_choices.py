"""mistral.rs with a canary; first run: kvref canary make canary"""

import json
from pathlib import Path

from mistralrs import Architecture, ChatCompletionRequest, CompletionRequest, Runner, Which

file, decoder = Path("canary/tokenizer.json"), {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}
file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": decoder}))  # it must not be null
runner = Runner(which=Which.Plain(model_id="canary", arch=Architecture.Llama))
syllables = ["ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu"]
prompt = " ".join(a + b for a in syllables[:6] for b in syllables)
asked = {"model": "default", "max_tokens": 4, "n_choices": 3, "temperature": 0.0}

said = ["", "", ""]
for chunk in runner.send_chat_completion_request(ChatCompletionRequest(messages=prompt, stream=True, **asked)):
    for choice in chunk.choices:
        said[choice.index] += choice.delta.content
print(said)  # defidegodehudeka, defidegodehu, defidegodehu
answer = runner.send_chat_completion_request(ChatCompletionRequest(messages=prompt, **asked))
print([choice.message.content for choice in answer.choices])  # three times defidegodehudeka
print(len(runner.send_completion_request(CompletionRequest(prompt=prompt, **asked)).choices))  # 1
