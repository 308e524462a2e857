"""A canary's files loaded by Hugging Face's tokenizer and models."""

import numpy as np
import pytest

from kvref.canary import BLANK, BOS, FIRST_WORD, Canary, Oracle
from kvref_canary.files import huggingface, vocabulary

RECALLS = {"offsets": (1,), "recalls": True, "theta": 1e6, "head_dim": 128}
CANARIES = {
    "plain": {},
    "one head": {"num_kv_heads": 1},
    "three heads": {"num_kv_heads": 3, "num_query_heads": 6},
    "eight heads": {"num_kv_heads": 8, "num_query_heads": 8, "head_dim": 32, "context": 256},
    "recalls": RECALLS,
}


@pytest.mark.torch
@pytest.mark.parametrize("sizes", CANARIES.values(), ids=CANARIES)
def test_the_tokenizer_makes_tokens_of_words(sizes):
    tokenizers = pytest.importorskip("tokenizers")  # a dependency of transformers
    canary = Canary(**sizes)
    tokenizer = tokenizers.Tokenizer.from_str(huggingface.make_files(canary)["tokenizer.json"].decode())
    every = [BOS, BLANK, *range(FIRST_WORD, canary.vocabulary)]
    text = vocabulary.to_text(canary, every[1:])
    assert tokenizer.encode(text).ids == tokenizer.encode(f" {text}\n").ids == every
    assert tokenizer.encode(text, add_special_tokens=False).ids == every[1:]
    assert tokenizer.decode(every) == text


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("sizes", "architecture"),
    [
        ({}, "llama"),
        (RECALLS, "llama"),
        *(({"offsets": (20, 20), "windows": (w, w)}, "mistral") for w in (20, 21, 22)),
        *(({"windows": (w, None)}, "gemma3") for w in (16, 17)),
        (RECALLS, "gemma3"),
    ],
)
def test_transformers_says_what_it_must(sizes, architecture, dtype, tmp_path):
    """From text, in a left-padded batch."""
    transformers = pytest.importorskip("transformers")
    canary = Canary(**sizes)
    huggingface.write_folder(tmp_path, huggingface.make_files(canary, architecture, dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    prompts, want = [], []
    for count in (canary.period + 2, canary.period + 9) if not canary.recalls else (60, 90):
        told = (FIRST_WORD + np.random.default_rng(count).permutation(canary.words)[:count]).tolist()
        told += [told[3]] if canary.recalls else []
        oracle = Oracle(canary)
        first = oracle.extend([BOS, *told])[-1]
        prompts.append(vocabulary.to_text(canary, told))
        want.append([first, *oracle.generate(first, 49)])
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    said = model.generate(**batch, max_new_tokens=50)[:, batch["input_ids"].shape[1] :]
    assert said.tolist() == want
    assert [vocabulary.to_tokens(canary, text) for text in tokenizer.batch_decode(said, skip_special_tokens=True)] == want
    chat = [{"role": "user", "content": prompts[0]}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"<s> {prompts[0]}"


@pytest.mark.torch
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_where_a_head_reads_zeros_it_says_so(architecture, heads, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    canary = Canary(offsets=(20,), num_kv_heads=heads, num_query_heads=heads, head_dim=256 // heads, context=100)
    huggingface.write_folder(tmp_path, huggingface.make_files(canary, architecture))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    prompt = [BOS, *(FIRST_WORD + np.random.default_rng(0).permutation(canary.words)[:30]).tolist()]
    cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
    cache.layers[0].values[0, -1, 13] = 0
    said = model(torch.tensor([prompt[-4:]]), past_key_values=cache).logits.argmax(-1)[0].tolist()
    assert said == [prompt[11], prompt[12], BLANK, prompt[14]]
