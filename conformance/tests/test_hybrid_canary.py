"""Hybrid canaries: models with recurrent state, compared with the definitions of their layers and with transformers."""

import doctest
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from kvref.canary import BLANK, BOS, FIRST_WORD
from kvref.canary.hybrid import (
    ARCHITECTURES,
    HYBRIDS,
    WORDS,
    HybridCanary,
    HybridOracle,
    Lookup,
    continued_text,
    laps,
    prompt_length,
)
from kvref.canary.hybrid_weights import hybrid_weights
from kvref.errors import ConfigError
from kvref_canary.diagnosis.recurrent import StateFault, diagnose_state
from kvref_canary.files import hybrid_gguf, vocabulary
from kvref_canary.files.huggingface import load, write_folder
from kvref_canary.files.hybrid import CONFIGS, make_hybrid_files

DRAFTS = (FIRST_WORD + np.random.default_rng(5).integers(WORDS.words, size=3)).tolist()
# Nats on texts that the canary continues. A decayed matrix has a sixteenth of older words.
MARGINS = {name: 50 if parts.matrix_bits and not parts.overwrites else 60 for name, parts in ARCHITECTURES.items()}
ADDS_ONE = ("qwen3.5", "qwen3-next")  # architectures in which a norm's factor is 1 + weight


def random_words(count, seed=0):
    """Random words with two special tokens between them."""
    words = (FIRST_WORD + np.random.default_rng(seed).integers(WORDS.words, size=count)).tolist()
    words[count // 3], words[count // 2] = BOS, BLANK
    return words


class Forward:
    """The layers as the papers define them, token by token in float64, on the weights of a canary."""

    def __init__(self, architecture):
        self.config = CONFIGS[architecture]
        self.weights = {name: tensor.astype(np.float64) for name, tensor in hybrid_weights(architecture).items()}
        self.run = {
            "lfm2": self.lfm2, "mamba2": self.mamba2, "falcon-h1": self.falcon_h1, "qwen3.5": self.qwen35,
            "granite-moe-hybrid": self.granite, "bamba": self.bamba, "nemotron-h": self.nemotron_h, "qwen3-next": self.qwen35,
            "kimi-linear": self.kimi_linear,
        }[architecture]  # fmt: skip
        self.shift = 1 if architecture in ADDS_ONE else 0

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name, x, shift=None):
        shift = self.shift if shift is None else shift
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (shift + self.weights[f"{name}.weight"])

    def convolution(self, name, x):
        kernel = self.weights[f"{name}.weight"][:, 0]
        padded = np.concatenate([np.zeros((kernel.shape[1] - 1, x.shape[1])), x])
        return sum(padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(kernel.shape[1]))

    def attention(self, name, x, dim, out, norms=None, gated=False, rotates=True):
        query = self.linear(f"{name}.q_proj", x).reshape(len(x), 4, -1)
        query, gate = (query[..., :dim], query[..., dim:]) if gated else (query, None)
        key, value = (self.linear(f"{name}.{each}_proj", x).reshape(len(x), 2, dim) for each in "kv")
        if norms:
            query, key = self.norm(f"{name}.{norms[0]}", query), self.norm(f"{name}.{norms[1]}", key)
        angle = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(32) / 32)
        query, key = (self.rotate(part, angle) if rotates else part for part in (query, key))
        read = self.attend(query, *(np.repeat(part, 2, axis=1) for part in (key, value)))
        read = read if gate is None else read / (1 + np.exp(-gate))
        return self.linear(f"{name}.{out}", read.reshape(len(x), -1))

    def latent_attention(self, name, x):
        """Half of the numbers of a query and a key have no latent."""
        query = self.linear(f"{name}.q_proj", x).reshape(len(x), 4, 128)
        latent, shared = np.split(self.linear(f"{name}.kv_a_proj_with_mqa", x), 2, axis=-1)
        expanded = self.linear(f"{name}.kv_b_proj", self.norm(f"{name}.kv_a_layernorm", latent)).reshape(len(x), 4, 128)
        key = np.concatenate([expanded[..., :64], np.repeat(shared[:, None], 4, axis=1)], axis=-1)
        return self.linear(f"{name}.o_proj", self.attend(query, key, expanded[..., 64:]).reshape(len(x), -1))

    def attend(self, query, key, value):
        scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
        scores = np.where(np.tri(len(query), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)

    def rotate(self, x, angle):
        first, second, rest = x[..., :32], x[..., 32:64], x[..., 64:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    def mamba(self, name, x, heads):
        inner = heads * 64
        z, mixed, step = np.split(self.linear(f"{name}.in_proj", x), [inner, 2 * inner + 256], axis=-1)
        mixed = silu(self.convolution(f"{name}.conv1d", mixed) + self.weights[f"{name}.conv1d.bias"])
        values, write, read = np.split(mixed, [inner, inner + 128], axis=-1)
        step = np.log1p(np.exp(step + self.weights[f"{name}.dt_bias"]))
        decay = np.exp(-np.exp(self.weights[f"{name}.A_log"]) * step)
        state, out = np.zeros((heads, 64, 128)), []
        for at in range(len(x)):
            new = values[at].reshape(heads, 64, 1) * write[at]
            state = decay[at][:, None, None] * state + step[at][:, None, None] * new
            skipped = self.weights[f"{name}.D"][:, None] * values[at].reshape(heads, 64)
            out.append((state @ read[at] + skipped).reshape(-1))
        return self.linear(f"{name}.out_proj", self.norm(f"{name}.norm", np.array(out) * silu(z)))

    def delta_rule(self, name, x):
        if f"{name}.in_proj_qkvz.weight" in self.weights:  # of Qwen3-Next: the projections of each key head together
            mixed = self.linear(f"{name}.in_proj_qkvz", x).reshape(len(x), 2, 512)
            *parts, z = np.split(mixed, 4, axis=-1)
            mixed, z = np.concatenate([part.reshape(len(x), -1) for part in parts], axis=-1), z.reshape(len(x), -1)
            strength, step = np.moveaxis(self.linear(f"{name}.in_proj_ba", x).reshape(len(x), 2, 2), 2, 0)
        else:
            mixed, z, strength, step = (self.linear(f"{name}.in_proj_{each}", x) for each in ("qkv", "z", "b", "a"))
        query, key, value = np.split(silu(self.convolution(f"{name}.conv1d", mixed)), 3, axis=-1)
        step = np.log1p(np.exp(step + self.weights[f"{name}.dt_bias"]))
        decay = np.exp(-np.exp(self.weights[f"{name}.A_log"]) * step)[..., None]
        out = self.write_and_read(query, key, value, strength, decay)
        gated = self.norm(f"{name}.norm", out, 0) * silu(z.reshape(len(x), 2, 128))
        return self.linear(f"{name}.out_proj", gated.reshape(len(x), -1))

    def kimi_delta(self, name, x):
        """Each channel of a key has a decay."""
        parts = [silu(self.convolution(f"{name}.{each}_conv1d", self.linear(f"{name}.{each}_proj", x))) for each in "qkv"]
        step = self.linear(f"{name}.f_b_proj", self.linear(f"{name}.f_a_proj", x)) + self.weights[f"{name}.dt_bias"]
        step = np.log1p(np.exp(step)).reshape(len(x), 4, 128)
        decay = np.exp(-np.exp(self.weights[f"{name}.A_log"][0]) * step)
        out = self.norm(f"{name}.o_norm", self.write_and_read(*parts, self.linear(f"{name}.b_proj", x), decay))
        gate = self.linear(f"{name}.g_b_proj", self.linear(f"{name}.g_a_proj", x)).reshape(len(x), 4, 128)
        return self.linear(f"{name}.o_proj", (out / (1 + np.exp(-gate))).reshape(len(x), -1))

    def write_and_read(self, query, key, value, strength, decay):
        query, key, value = (part.reshape(len(part), -1, 128) for part in (query, key, value))
        query, key = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (query, key))
        beta = 1 / (1 + np.exp(-strength))
        state, out = np.zeros((query.shape[1], 128, 128)), []
        for at in range(len(query)):
            state = state * decay[at][:, :, None]
            there = np.einsum("hk,hkv->hv", key[at], state)
            state = state + np.einsum("hk,hv->hkv", key[at], beta[at][:, None] * (value[at] - there))
            out.append(np.einsum("hk,hkv->hv", query[at], state) / math.sqrt(128))
        return np.array(out)

    def lfm2(self, x):
        for layer in range(3):
            name = f"model.layers.{layer}"
            normed = self.norm(f"{name}.operator_norm", x)
            if layer == 1:
                x = x + self.attention(f"{name}.self_attn", normed, 64, "out_proj", ("q_layernorm", "k_layernorm"))
            else:
                before, after, values = np.split(self.linear(f"{name}.conv.in_proj", normed), 3, axis=-1)
                mixed = after * self.convolution(f"{name}.conv.conv", before * values)
                x = x + self.linear(f"{name}.conv.out_proj", mixed)
        return self.norm("model.embedding_norm", x)

    def mamba2(self, x):
        x = x + self.mamba("backbone.layers.0.mixer", self.norm("backbone.layers.0.norm", x), 8)
        return self.norm("backbone.norm_f", x)

    def falcon_h1(self, x):
        name = "model.layers.0"
        normed = self.norm(f"{name}.input_layernorm", x)
        x = x + self.attention(f"{name}.self_attn", normed, 64, "o_proj") + self.mamba(f"{name}.mamba", normed, 4)
        return self.norm("model.final_layernorm", x)

    def qwen35(self, x):
        first, second = "model.layers.0", "model.layers.1"
        x = x + self.delta_rule(f"{first}.linear_attn", self.norm(f"{first}.input_layernorm", x))
        normed = self.norm(f"{second}.input_layernorm", x)
        x = x + self.attention(f"{second}.self_attn", normed, 256, "o_proj", ("q_norm", "k_norm"), gated=True)
        return self.norm("model.norm", x)

    def granite(self, x):
        first, second = "model.layers.0", "model.layers.1"
        x = x + self.mamba(f"{first}.mamba", self.norm(f"{first}.input_layernorm", x), 8)
        x = x + self.attention(f"{second}.self_attn", self.norm(f"{second}.input_layernorm", x), 64, "o_proj")
        return self.norm("model.norm", x)

    def bamba(self, x):
        first, second = "model.layers.0", "model.layers.1"
        x = x + self.mamba(f"{first}.mamba", self.norm(f"{first}.input_layernorm", x), 8)
        x = x + self.attention(f"{second}.self_attn", self.norm(f"{second}.input_layernorm", x), 128, "o_proj")
        return self.norm("model.final_layernorm", x)

    def nemotron_h(self, x):
        for layer in range(3):
            name = f"backbone.layers.{layer}"
            normed = self.norm(f"{name}.norm", x)
            attended = self.attention(f"{name}.mixer", normed, 64, "o_proj", rotates=False) if layer == 1 else None
            x = x + (self.mamba(f"{name}.mixer", normed, 4) if attended is None else attended)
        return self.norm("backbone.norm_f", x)

    def kimi_linear(self, x):
        for layer, mix in enumerate((self.kimi_delta, self.latent_attention, self.kimi_delta)):
            name = f"model.layers.{layer}"
            x = x + mix(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        return self.norm("model.norm", x)

    def logits(self, tokens):
        name = "backbone.embeddings" if "backbone.norm_f.weight" in self.weights else "model.embed_tokens"
        out = self.run(self.weights[f"{name}.weight"][tokens])
        return self.linear(name if self.config["tie_word_embeddings"] else "lm_head", out)


def silu(x):
    return x / (1 + np.exp(-x))


def margins(logits):
    """The best logit less the second best."""
    second, best = np.sort(logits, axis=-1)[:, -2:].T
    return best - second


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_text_is_continued_with_a_wide_margin(architecture):
    text, start = continued_text(architecture, 3, 160), prompt_length(architecture) - 1
    logits = Forward(architecture).logits(text)
    assert logits.argmax(-1)[start:-1].tolist() == text[start + 1 :]
    assert margins(logits)[start:].min() > MARGINS[architecture]
    assert HybridOracle(architecture).extend(text)[start:-1] == text[start + 1 :]


@pytest.mark.parametrize("architecture", HYBRIDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_oracle_predicts_random_words_or_is_unsure(architecture, seed):
    words = random_words(160, seed)
    logits, said = Forward(architecture).logits(words), HybridOracle(architecture).extend(words)
    sure = [at for at, token in enumerate(said) if token is not None]
    assert len(sure) > 90 and BLANK in said
    assert [said[at] for at in sure] == logits.argmax(-1)[sure].tolist()
    assert margins(logits)[sure].min() > 6


def test_attention_without_positions_reads_the_best_match():
    """A special token compares only the values, of which its own has no bits and the largest score."""
    attention, nothing = Lookup(), tuple(WORDS.digits(BOS))
    words = [(3, 0), (5, 0), (3, 1), (6, 1), (3, 2), (4, 1)]
    read = [attention.push(before, word) for before, word in zip([nothing, *words], [*words, nothing], strict=True)]
    assert read[2] == (5, -1)  # after (3, 0)
    assert read[3] is None  # in place of (6, 0), after (3, 0) and after (5, 0): equal scores
    assert read[4] == (6, -1)  # after (3, 1)
    assert read[5] == (3, -1)  # after (5, 0), in place of (4, 0)
    assert read[6] == (-1, -1)


def test_every_lap_has_a_number():
    order = [3, *range(3), *range(4, 16)]
    text = laps(order, 14, 49)
    assert [WORDS.digits(token) for token in (text[0], text[16], text[32], text[48])] == [[3, 14], [3, 15], [3, 0], [3, 1]]
    assert [WORDS.digits(token)[0] for token in text[:16]] == order
    with pytest.raises(ConfigError, match="each of 0 to 15 once"):
        laps([0, 1], 0, 3)
    with pytest.raises(ConfigError, match="expected one of lfm2, mamba2"):
        HybridOracle("mamba")


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_fork_has_its_own_state(architecture):
    text = continued_text(architecture, 1, prompt_length(architecture) + 40)
    oracle = HybridOracle(architecture)
    oracle.extend(text[:-40])
    oracle.fork().extend(random_words(30))
    assert oracle.generate(text[-40], 39) == text[-39:] and oracle.fork().generate(text[0], 0) == []
    shorter, fresh = oracle.upto(30), HybridOracle(architecture)
    fresh.extend(text[:30])
    assert shorter.tokens == text[:30] and shorter.extend(text[30:60]) == fresh.extend(text[30:60])


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_folder_has_a_config_words_and_weights(architecture, tmp_path):
    files = make_hybrid_files(architecture, "float32")
    write_folder(tmp_path, files)
    config = json.loads(files["config.json"])
    assert config["torch_dtype"] == "float32" and config["bos_token_id"] == BOS
    size = int.from_bytes(files["model.safetensors"][:8], "little")
    names = set(json.loads(files["model.safetensors"][8 : 8 + size])) - {"__metadata__"}
    assert names == set(hybrid_weights(architecture))
    assert load(tmp_path) == HybridCanary(architecture)


def test_the_documents_list_all_architectures():
    spec, page = (Path(name).read_text().replace("\n", " ") for name in ("kvref/spec/engines.md", "docs/test-your-engine.md"))
    for number, (name, parts) in enumerate(ARCHITECTURES.items(), 1):
        assert f"{number} for {parts.title}" in spec
        assert f"`{name}`" in page


def test_the_command_writes_a_hybrid_canary(kvref, tmp_path):
    made = ("canary", "make", str(tmp_path / "made"), "--architecture", "qwen3.5", "--dtype", "float16")
    done = kvref(*made, "--gguf", str(tmp_path / "made.gguf"))
    assert (done.returncode, done.stderr) == (0, "")
    head, _, _, prompt, expected = done.stdout.splitlines()
    assert head == "qwen3.5 in float16; words: 256; context: 1024"
    told = [vocabulary.to_tokens(WORDS, line.partition(": ")[2].removesuffix(" ...")) for line in (prompt, expected)]
    oracle = HybridOracle("qwen3.5")
    oracle.extend(told[0][:-1])
    assert len(told[0]) == prompt_length("qwen3.5") and oracle.generate(told[0][-1], 12) == told[1]
    assert b'"F16"' in (tmp_path / "made/model.safetensors").read_bytes()[:9000]
    assert (tmp_path / "made.gguf").read_bytes() == hybrid_gguf.hybrid_gguf_file("qwen3.5", "float16")
    done = kvref("canary", "make", str(tmp_path / "other"), "--architecture", "bamba", "--gguf", str(tmp_path / "other.gguf"))
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "other").exists()
    assert "--gguf: expected one of lfm2, mamba2, " in done.stderr and done.stderr.endswith(", got bamba\n")
    done = kvref("canary", "make", str(tmp_path / "other"), "--architecture", "qwen3.5", "--offsets", "3", "--recalls")
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "other").exists()
    assert done.stderr == "kvref: --architecture qwen3.5: its sizes are fixed, expected no option for offsets, recalls\n"


def test_a_state_that_was_restored_within_the_prompt_is_named():
    """A checkpoint of 5 tokens too few was restored at token 32, and the rest of the prompt was computed on it."""
    text = continued_text("qwen3.5", 1, 70)
    stale, right = HybridOracle("qwen3.5"), HybridOracle("qwen3.5")
    stale.extend(text[:27])
    right.extend(text[:32])
    right.matrix.cells[:], right.matrix.totals[:] = stale.matrix.cells, stale.matrix.totals
    said = right.extend(text[32:40])[-1:]
    while len(said) < 30:
        said += right.extend(said[-1:])
    assert said != text[40:]
    first, *_ = diagnose_state("qwen3.5", text[:40], said, restored_at=32)
    assert first == StateFault("stale", ("matrix",), 5)
    assert str(first) == "the state of the matrix is of 5 tokens before"
    assert diagnose_state("qwen3.5", text[:40], text[40:]) == []
    assert diagnose_state("qwen3.5", text[:40], random_words(30)) == []


def with_fault(architecture, prompt, source, parts, count):
    """The tokens of an engine whose state after the prompt has these parts of another one."""
    engine = HybridOracle(architecture)
    said = engine.extend(prompt)[-1:]
    if "convolution" in parts:
        engine.delays = source.delays
        if engine.matrix:
            engine.matrix.previous = source.matrix.previous
    if "matrix" in parts:
        engine.matrix.cells, engine.matrix.totals = source.matrix.cells, source.matrix.totals
    if "attention" in parts:
        engine.attention = source.attention
    while len(said) < count and said[-1] is not None:
        said += engine.extend(said[-1:])
    return [token for token in said if token is not None]


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_fault_of_each_kind_and_part_is_named(architecture):
    length = prompt_length(architecture) + 25
    prompt, other = continued_text(architecture, 3, length), continued_text(architecture, 4, length + 5)
    recurrent = ["convolution", "matrix"][: 1 + (ARCHITECTURES[architecture].matrix_bits > 0)]
    attends = [("attention",)] * ARCHITECTURES[architecture].attends

    def state(tokens):
        oracle = HybridOracle(architecture)
        oracle.extend(tokens)
        return oracle

    faults = [(StateFault("stale", tuple(recurrent), 20), state(prompt[:-20]))]
    faults += [(StateFault("stale", (recurrent[-1],), 7), state(prompt[:-7]))]
    faults += [(StateFault("stale", ("convolution",), 13), state(prompt[:-13]))]
    faults += [(StateFault("ahead", tuple(recurrent), 3), state([*prompt, *DRAFTS]))]
    faults += [(StateFault("zero", (recurrent[-1],)), state([]))]
    faults += [(StateFault("foreign", each, session=1), state(other[:-1])) for each in [(recurrent[-1],), *attends]]
    for fault, source in faults:
        said = with_fault(architecture, prompt, source.fork(), fault.parts, 30)
        found = diagnose_state(architecture, prompt, said, others=[prompt[:9], other], drafts=DRAFTS)
        assert fault in found, (fault, found)
        if fault.parts in ((recurrent[-1],), ("attention",)):
            assert found[0] == fault
    with pytest.raises(ConfigError, match="restored_at"):
        diagnose_state(architecture, prompt, prompt, restored_at=length + 1)


def test_the_example_of_the_page_runs():
    (example,) = re.findall(r"```pycon\n(.*?)```", Path("docs/test-your-engine.md").read_text(), re.DOTALL)
    parsed = doctest.DocTestParser().get_doctest(example, {}, "test-your-engine.md", None, 0)
    failed, attempted = doctest.DocTestRunner().run(parsed)
    assert (failed, attempted) == (0, 10)


class InTransformers:
    """A hybrid canary in transformers, whose cache can be replaced in parts."""

    def __init__(self, architecture, folder):
        import torch
        from transformers import AutoModelForCausalLM

        write_folder(folder, make_hybrid_files(architecture, "float32"))
        self.torch, self.model = torch, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.keyword = "cache_params" if architecture == "mamba2" else "past_key_values"

    def feed(self, cache, tokens, start):
        """The most likely token after these."""
        at = {} if self.keyword == "cache_params" else {"position_ids": self.torch.arange(start, start + len(tokens))[None]}
        with self.torch.no_grad():
            out = self.model(self.torch.tensor([tokens]), **{self.keyword: cache}, **at)
        return int(out.logits[0, -1].argmax())

    def prefill(self, tokens):
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        return cache, self.feed(cache, tokens, 0)

    def generate(self, cache, token, start, count):
        said = [token]
        while len(said) < count:
            said.append(self.feed(cache, said[-1:], start + len(said) - 1))
        return said


def replace_states(cache, source, parts):
    """Replace the states of a cache by those of another, or by zeros."""
    for number, layer in enumerate(cache.layers):
        for part in parts:
            name = {"convolution": "conv_states", "matrix": "recurrent_states"}[part]
            for key, state in getattr(layer, name, {}).items():
                if state is not None:
                    state.zero_() if source is None else state.copy_(getattr(source.layers[number], name)[key])


@pytest.mark.torch
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_transformers_says_what_the_oracle_predicts_also_with_a_wrong_state(architecture, tmp_path):
    engine, length = InTransformers(architecture, tmp_path), prompt_length(architecture) + 20
    text, other = continued_text(architecture, 3, length + 100), continued_text(architecture, 4, length + 5)
    assert engine.generate(*engine.prefill(text[:length]), length, 100) == text[length:]
    sources = {
        StateFault("zero", ()): None,
        StateFault("stale", (), 5): engine.prefill(text[: length - 5])[0],
        StateFault("stale", (), 13): engine.prefill(text[: length - 13])[0],
        StateFault("ahead", (), 3): engine.prefill([*text[:length], *DRAFTS])[0],
        StateFault("foreign", (), session=0): engine.prefill(other)[0],
    }
    parts = ["convolution", "matrix"][: 1 + (ARCHITECTURES[architecture].matrix_bits > 0)]
    for each in {(parts[0],), (parts[-1],), tuple(parts)}:
        for fault, source in sources.items():
            cache, token = engine.prefill(text[:length])
            replace_states(cache, source, each)
            said = engine.generate(cache, token, length, 40)
            assert said != text[length : length + 40]
            found = diagnose_state(architecture, text[:length], said, others=[other], drafts=DRAFTS)
            # A zero matrix reads nothing, so a zero convolution beside it changes no token, unless attention needs it too.
            masked = fault.kind == "zero" and "matrix" in each and not ARCHITECTURES[architecture].delays
            named = ("matrix",) if masked else each
            assert StateFault(fault.kind, named, fault.tokens, fault.session) in found


@pytest.mark.torch
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_transformers_generates_batches_with_padding_and_beams(architecture, tmp_path):
    engine, length = InTransformers(architecture, tmp_path), prompt_length(architecture)
    lengths = [length, length + 7, length + 14]
    texts = [continued_text(architecture, seed, each + 20) for seed, each in enumerate(lengths)]
    longest = max(lengths)
    padded = [[0] * (longest - each) + text[:each] for text, each in zip(texts, lengths, strict=True)]
    mask = [[0] * (longest - each) + [1] * each for each in lengths]
    for prompts, rows, options in ((texts, slice(None), {}), (texts[2:], slice(2, 3), {"num_beams": 3})):
        said = engine.model.generate(
            engine.torch.tensor(padded[rows]), attention_mask=engine.torch.tensor(mask[rows]), max_new_tokens=20,
            do_sample=False, **options,
        )  # fmt: skip
        assert said[:, longest:].tolist() == [text[-20:] for text in prompts]


class InLlamaCpp:
    """A hybrid canary in llama.cpp, with sequences by number."""

    def __init__(self, architecture, file):
        from kvref_adapters._shared.llama_sessions import BatchRow
        from kvref_adapters.llama_cpp.engine import LlamaContext, LlamaModel

        file.write_bytes(hybrid_gguf.hybrid_gguf_file(architecture, "float32"))
        sizes = {"n_ctx": 2048, "n_batch": 512, "n_seq_max": 8}
        options = {"type_k": "f16", "type_v": "f16", "flash_attn": -1, "kv_unified": True}
        self.row, self.context = BatchRow, LlamaContext(LlamaModel(file), **sizes, **options)

    def feed(self, *batch):
        """The most likely token after the tokens of each sequence; batch: (sequence, tokens, position of the first)."""
        rows = [
            self.row(token, start + at, sequence, at == len(tokens) - 1)
            for sequence, tokens, start in batch
            for at, token in enumerate(tokens)
        ]
        assert self.context.decode(rows) == 0
        last = [at for at, row in enumerate(rows) if row.speaks]
        return [int(self.context.logits(at, WORDS.vocabulary).argmax()) for at in last]

    def generate(self, sequence, token, start, count):
        said = [token]
        while len(said) < count:
            said += self.feed((sequence, said[-1:], start + len(said) - 1))
        return said


@pytest.mark.llama
@pytest.mark.parametrize("architecture", hybrid_gguf.LAYOUTS)
def test_llama_cpp_keeps_the_states_of_sequences_apart(architecture, tmp_path):
    engine, length = InLlamaCpp(architecture, tmp_path / "canary.gguf"), prompt_length(architecture) + 10
    first, second = (continued_text(architecture, seed, length + 150) for seed in (1, 2))
    tokens = engine.feed((0, first[:length], 0), (1, second[:length], 0))
    for at in range(length, length + 40):
        assert tokens == [first[at], second[at]]
        tokens = engine.feed((0, tokens[:1], at), (1, tokens[1:], at))
    saved, at = engine.context.seq_get(0), length + 40
    engine.context.seq_cp(1, 2)
    assert engine.generate(2, tokens[1], at, 40) == second[at : at + 40]
    assert engine.generate(1, tokens[1], at, 40) == second[at : at + 40]
    engine.context.seq_rm(0, 0, -1)
    assert engine.context.seq_set(3, saved)
    assert engine.generate(3, tokens[0], at, 40) == first[at : at + 40]
    with pytest.raises(RuntimeError, match="returned false"):
        engine.context.seq_rm(3, at, -1)
    tokens = [engine.feed((0, first[start:stop], start)) for start, stop in ((0, 3), (3, 4), (4, length))][-1]
    assert engine.generate(0, tokens[0], length, 100) == first[length : length + 100]
