"""llama.cpp with hybrid canaries and n_rs_seq: after a rollback, copies and saved sequences continue with another state.

So does a sequence after a rollback past its last batch, and after a batch that was aborted.
"""

from pathlib import Path

from kvref.canary import FIRST_WORD
from kvref.canary.hybrid import WORDS, continued_text, prompt_length
from kvref_adapters._shared.llama_sessions import BatchRow
from kvref_adapters.llama_cpp.engine import LlamaContext, LlamaModel  # the functions of llama.h
from kvref_canary.files.gguf import write_gguf
from kvref_canary.files.hybrid_gguf import hybrid_gguf_file

COUNT = 24
options = {"type_k": "f16", "type_v": "f16", "flash_attn": -1, "kv_unified": True}


def decode(context, tokens, position, sequence=0):
    """Decode tokens, and return the most likely token after the last."""
    last = len(tokens) - 1
    assert context.decode([BatchRow(token, position + at, sequence, at == last) for at, token in enumerate(tokens)]) == 0
    return int(context.logits(last, WORDS.vocabulary).argmax())


def generate(context, token, position, sequence=0):
    said = [token]
    while len(said) < COUNT:
        said.append(decode(context, said[-1:], position + len(said) - 1, sequence))
    return said


for architecture in ("lfm2", "qwen3.5"):
    file = Path(f"canary-{architecture}.gguf")
    write_gguf(file, hybrid_gguf_file(architecture, "float32"))
    length = prompt_length(architecture) + 10
    text = continued_text(architecture, 1, length + 1 + COUNT)
    drafts = [FIRST_WORD + 7, FIRST_WORD + 77, FIRST_WORD + 177]
    for case in (
        "rollback", "rollback, then a copy", "drafts in two batches, then rollback", "aborted batch",
        "saved and loaded, then rollback",
    ):  # fmt: skip
        context = LlamaContext(LlamaModel(file), n_ctx=512, n_batch=256, n_seq_max=2, n_rs_seq=8, **options)
        decode(context, text[:length], 0)
        if "two batches" in case:
            decode(context, [text[length], *drafts[:2]], length)
            decode(context, drafts[2:], length + 3)
        elif "aborted" in case:
            decode(context, text[length : length + 1], length)
            assert context.decode_aborted([BatchRow(drafts[0], length + 1, 0, True)]) == 2
        else:
            decode(context, [text[length], *drafts], length)
        sequence = 0
        if "saved" in case:
            assert context.seq_set(1, context.seq_get(0))
            sequence = 1
        if "aborted" not in case:
            context.seq_rm(sequence, length + 1, -1)  # all drafts are rejected; it raises if llama_memory_seq_rm returns false
        if "copy" in case:
            context.seq_cp(0, 1)
            sequence = 1
        said = generate(context, text[length + 1], length + 1, sequence)
        right = sum(got == want for got, want in zip(said, text[length + 1 :], strict=True))
        print(f"{architecture}, {case}: {right} of {COUNT} tokens are right")
