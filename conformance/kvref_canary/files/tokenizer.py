"""The tokenizer of a canary as the files of a Hugging Face folder."""

from typing import Any

from kvref.canary import BOS, EOS, UNKNOWN, Canary
from kvref_canary.files.vocabulary import SPECIAL_WORDS, vocabulary

# The template passes each message unchanged, after a space; `bos_token` first, as the tokenizer adds it to a text.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"


def tokenizer_files(canary: Canary) -> dict[str, Any]:
    """Return JSON documents by file name. Each word between spaces is a token; decoding joins tokens with one space."""
    special = {
        "bos_token": SPECIAL_WORDS[BOS],
        "eos_token": SPECIAL_WORDS[EOS],
        "unk_token": SPECIAL_WORDS[UNKNOWN],
        "pad_token": SPECIAL_WORDS[UNKNOWN],
    }
    begin, end = {"SpecialToken": {"id": SPECIAL_WORDS[BOS], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": token, "content": content, **flags} for token, content in SPECIAL_WORDS.items()]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [begin, end],
                "pair": [begin, end, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {SPECIAL_WORDS[BOS]: {"id": SPECIAL_WORDS[BOS], "ids": [BOS], "tokens": [SPECIAL_WORDS[BOS]]}},
            },
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: token for token, word in enumerate(vocabulary(canary))},
                "unk_token": SPECIAL_WORDS[UNKNOWN],
            },
        },
        "tokenizer_config.json": {
            **special,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": canary.context,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {str(token): {"content": content, **flags} for token, content in SPECIAL_WORDS.items()},
            "chat_template": CHAT_TEMPLATE,
        },
        "special_tokens_map.json": special,
    }
