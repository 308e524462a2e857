"""The tokenizer of a canary as the files of a Hugging Face folder."""

from typing import Any

from kvref.canary import BOS, EOS, UNKNOWN, Canary
from kvref_canary.files.vocabulary import SPECIAL, vocabulary

# The template passes each message unchanged, after a space; `bos_token` first, as the tokenizer adds it to a text.
CHAT = "{{ bos_token }}{% for message in messages %} {{ message['content'] }}{% endfor %}"


def tokenizer_files(canary: Canary) -> dict[str, Any]:
    """Return JSON documents by file name. Each word between spaces is a token; decoding joins tokens with one space."""
    special = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS], "unk_token": SPECIAL[UNKNOWN], "pad_token": SPECIAL[UNKNOWN]}
    begin, end = {"SpecialToken": {"id": SPECIAL[BOS], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": token, "content": content, **flags} for token, content in SPECIAL.items()]
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
                "special_tokens": {SPECIAL[BOS]: {"id": SPECIAL[BOS], "ids": [BOS], "tokens": [SPECIAL[BOS]]}},
            },
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: token for token, word in enumerate(vocabulary(canary))},
                "unk_token": SPECIAL[UNKNOWN],
            },
        },
        "tokenizer_config.json": {
            **special,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": canary.context,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": {str(token): {"content": content, **flags} for token, content in SPECIAL.items()},
            "chat_template": CHAT,
        },
        "special_tokens_map.json": special,
    }
