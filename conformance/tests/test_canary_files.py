"""A canary's files: words that the tokenizer splits again, equal bytes in a folder and a GGUF, and no file overwritten."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize

from kvref.canary import BLANK, BOS, EOS, FIRST_WORD, UNKNOWN, Canary, weights
from kvref.canary.oracle import repeated
from kvref.errors import ConfigError, TokenOutOfRange
from kvref_canary.files import gguf, huggingface, vocabulary
from kvref_conformance.exceptions import CannotRun

RECALLS = {"offsets": (1,), "recalls": True, "theta": 1e6, "head_dim": 128}
CANARIES = {
    "plain": {},
    "one head": {"num_kv_heads": 1},
    "three heads": {"num_kv_heads": 3, "num_query_heads": 6},
    "eight heads": {"num_kv_heads": 8, "num_query_heads": 8, "head_dim": 32, "context": 256},
    "recalls": RECALLS,
}
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
SCALARS = {4: "<I", 5: "<i", 6: "<f", 7: "<?"}  # types of a GGUF
each_canary = pytest.mark.parametrize("sizes", CANARIES.values(), ids=CANARIES)


@each_canary
def test_words_split_again_with_spaces_or_without(sizes):
    canary = Canary(**sizes)
    every = list(range(canary.vocabulary))
    spoken = [vocabulary.word_of(canary, token) for token in every]
    assert len(set(spoken)) == len(every)
    assert len({len(spoken[token]) for token in (BLANK, *range(FIRST_WORD, FIRST_WORD + canary.words))}) == 1
    assert vocabulary.to_tokens(canary, vocabulary.to_text(canary, every)) == every
    for text in ("".join(spoken), "\n".join(spoken), f"  {'   '.join(spoken)} \n"):
        assert vocabulary.to_tokens(canary, text) == every
    assert vocabulary.to_tokens(canary, "") == vocabulary.to_tokens(canary, " \n") == []


@each_canary
def test_a_syllable_names_the_head(sizes):
    canary = Canary(**sizes)
    each = len(vocabulary.word_of(canary, BLANK)) // canary.num_kv_heads
    digits = [0] * canary.num_kv_heads
    right = vocabulary.word_of(canary, canary.token(digits))
    for head in range(canary.num_kv_heads):
        for digit in range(1, 2**canary.bits):
            wrong = vocabulary.word_of(canary, canary.token([*digits[:head], digit, *digits[head + 1 :]]))
            differ = [place for place in range(len(right)) if wrong[place] != right[place]]
            assert differ and {place // each for place in differ} == {head}


def tensors_of(file):
    return {name: np.frombuffer(part["data"], DTYPES[part["dtype"]]).reshape(part["shape"]) for name, part in deserialize(file)}


HOSTILE = {
    "half a word": ("bade de", "'de' at character 5"),
    "a syllable that there is not": ("bade bado", "'bado' at character 5"),
    "a syllable of another head": ("xoba", "'xoba' at character 0"),
    "capitals": ("Bade", "'Bade' at character 0"),
    "a token that there is not": ("bade <unused9999>", "'<unused9999>' at character 5"),
    "a number of another spelling": ("<unused0260>", "'<unused0260>' at character 0"),
    "bytes of no text": ("bade \x00\x1b[31m", r"'\x00\x1b[31m' at character 5"),
    "another alphabet": ("b\N{CYRILLIC SMALL LETTER A}de", r"'b\u0430de' at character 0"),
    "a book": ("x" * 10**6, f"'{'x' * 40}' at character 0"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_word_is_refused(text, message):
    with pytest.raises(vocabulary.NotCanaryWords) as error:
        vocabulary.to_tokens(Canary(), text)
    assert str(error.value) == f"text: expected words of 4 letters such as baba, got {message}"


@pytest.mark.parametrize("token", [-1, 320, "4", True])
def test_a_token_that_there_is_not_has_no_word(token):
    with pytest.raises(TokenOutOfRange):
        vocabulary.word_of(Canary(), token)


@pytest.mark.parametrize("dtype", huggingface.DTYPES)
@each_canary
def test_the_weights_are_in_the_file(sizes, dtype):
    canary = Canary(**sizes)
    files = huggingface.make_files(canary, "llama", dtype)
    assert files == huggingface.make_files(Canary(**sizes), "llama", dtype)
    assert sum(map(len, files.values())) < 10e6
    want = {name: tensor.astype(getattr(ml_dtypes, dtype, dtype)) for name, tensor in weights(canary).items()}
    got = tensors_of(files["model.safetensors"])
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        np.testing.assert_array_equal(got[name], tensor)


def test_the_folder_says_what_an_engine_needs():
    canary = Canary(windows=(20, 20), offsets=(20, 19))
    files = {name: json.loads(data) for name, data in huggingface.make_files(canary, "mistral").items() if name.endswith("json")}
    config, tokenizer, about = files["config.json"], files["tokenizer.json"], files["tokenizer_config.json"]
    assert (config["model_type"], config["sliding_window"], config["torch_dtype"]) == ("mistral", 20, "bfloat16")
    assert (config["vocab_size"], config["rope_theta"], config["tie_word_embeddings"]) == (320, 10_000.0, False)
    for name, token in (("bos", BOS), ("eos", EOS), ("pad", UNKNOWN)):
        assert config[f"{name}_token_id"] == files["generation_config.json"][f"{name}_token_id"] == token
        assert tokenizer["model"]["vocab"][about[f"{name}_token"]] == token
    assert tokenizer["model"]["vocab"] == {vocabulary.word_of(canary, token): token for token in range(canary.vocabulary)}
    special = {each["id"] for each in tokenizer["added_tokens"]}
    assert special == {UNKNOWN, BOS, EOS}  # not the blank, which must be in the text when special tokens are skipped


@each_canary
def test_a_folder_is_read_back(sizes, tmp_path):
    canary = Canary(**sizes)
    for dtype in ("bfloat16", "float16"):  # the second one overwrites the first
        huggingface.write_folder(tmp_path / "new" / "deep", huggingface.make_files(canary, "llama", dtype))
        assert huggingface.load(tmp_path / "new" / "deep") == canary


OTHERWISE = {  # other values in canary.json
    "nothing": (None, "is not a canary: expected a folder with a canary.json"),
    "no JSON": ("{", "is not a canary"),
    "no document": ("[1]", "is not a canary"),
    "too deep": ("[" * 9000, "is not a canary"),
    "another's": ('{"name": "canary"}', "is not a canary"),
    "a later format": ('{"kvref_canary": 2}', "is not a canary"),
    "no sizes": ('{"kvref_canary": 1}', "canary.json: expected the sizes of a canary: offsets, recalls, context"),
    "words for numbers": ({"offsets": ["a"]}, "canary.json: expected the sizes of a canary"),
    "a number for offsets": ({"offsets": 3}, "canary.json: expected the sizes of a canary"),
    "no offset": ({"offsets": [None]}, "canary.json: expected the sizes of a canary"),
    "a word for theta": ({"theta": "1"}, "canary.json: expected the sizes of a canary"),
    "a window too many": ({"windows": [None]}, "canary.json: windows: expected one for each of 2 layers, got 1"),
    "a size of none": ({"head_dim": 0}, "canary.json: head_dim: expected an integer of at least 1, got 0"),
}


@pytest.mark.parametrize(("said", "message"), OTHERWISE.values(), ids=OTHERWISE)
def test_a_folder_that_is_no_canary_is_refused(said, message, tmp_path):
    files = huggingface.make_files(Canary())
    if isinstance(said, dict):
        said = json.dumps(json.loads(files[huggingface.SIZES_FILE]) | said)
    if said is not None:
        (tmp_path / huggingface.SIZES_FILE).write_text(said)
    with pytest.raises(CannotRun) as error:
        huggingface.load(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_architecture_that_has_no_such_windows_is_refused():
    with pytest.raises(ConfigError, match="expected mistral or gemma3 for layers with a window, got llama"):
        huggingface.make_files(Canary(windows=(16, 31)))
    with pytest.raises(ConfigError, match="expected the same for all layers of a mistral"):
        huggingface.make_files(Canary(windows=(16, None)), "mistral")
    with pytest.raises(ConfigError, match="--gguf: expected no windows"):
        gguf.gguf_file(Canary(windows=(16, 31)))
    for windows in ((None, 40), (16, 31), (16, None, None)):
        with pytest.raises(ConfigError, match="windows: expected the same width in all layers of a gemma3 except every n-th"):
            huggingface.make_files(Canary((16, 31, 5)[: len(windows)], windows=windows), "gemma3")
    with pytest.raises(ConfigError, match=r"num_query_heads \* head_dim: expected at least 29 for a gemma3, got 28"):
        huggingface.make_files(Canary((5, 6), num_query_heads=1, num_kv_heads=1, head_dim=28, context=40), "gemma3")


@pytest.mark.parametrize("windows", [(), (16, None), (31, 31)])
def test_a_gemma_is_told_its_windows_by_layer_and_by_rule(windows):
    config = json.loads(huggingface.make_files(Canary(windows=windows), "gemma3")["config.json"])
    layers = ["full_attention" if window is None else "sliding_attention" for window in windows or (None, None)]
    assert config["layer_types"] == layers
    every = config["sliding_window_pattern"]
    assert layers == ["sliding_attention" if number % every else "full_attention" for number in (1, 2)]
    assert config["sliding_window"] == (windows[0] if windows else 1024)
    assert config["rope_theta"] == config["rope_local_base_freq"]


class Reader:
    """Reads a GGUF as its specification defines it: keys and tensors by name."""

    def __init__(self, data):
        self.data, self.place = data, 0
        magic, version, tensors, keys = self.take("<4sIQQ")
        assert (magic, version) == (b"GGUF", 3)
        self.keys = {self.string(): self.value(*self.take("<I")) for _ in range(keys)}
        infos = [(self.string(), self.take(f"<{self.take('<I')[0]}Q"), *self.take("<IQ")) for _ in range(tensors)]
        start = -(-self.place // 32) * 32
        dtypes = {0: np.float32, 1: np.float16, 30: ml_dtypes.bfloat16}
        self.tensors = {
            name: np.frombuffer(data, dtypes[kind], int(np.prod(axes)), start + at).reshape(axes[::-1])
            for name, axes, kind, at in infos
        }

    def take(self, format):
        values = struct.unpack_from(format, self.data, self.place)
        self.place += struct.calcsize(format)
        return values

    def string(self):
        (length,) = self.take("<Q")
        return self.take(f"<{length}s")[0].decode()

    def value(self, kind):
        if kind == 9:
            each, length = self.take("<IQ")
            return [self.value(each) for _ in range(length)]
        return self.string() if kind == 8 else self.take(SCALARS[kind])[0]


@pytest.mark.parametrize("dtype", huggingface.DTYPES)
@each_canary
def test_a_gguf_holds_the_same(sizes, dtype):
    canary = Canary(**sizes)
    read, data = (
        Reader(gguf.gguf_file(canary, dtype)),
        tensors_of(huggingface.make_files(canary, "llama", dtype)["model.safetensors"]),
    )
    assert read.keys["general.architecture"] == "llama"
    assert json.loads(read.keys["kvref.canary.json"])["num_kv_heads"] == canary.num_kv_heads
    for token, piece in enumerate(read.keys["tokenizer.ggml.tokens"]):
        assert piece.removeprefix("\u2581") == vocabulary.word_of(canary, token)
        assert piece.startswith("\u2581") == (token not in vocabulary.SPECIAL_WORDS)
    assert len(read.tensors) == len(data)
    np.testing.assert_array_equal(read.tensors["output.weight"], data["lm_head.weight"])
    np.testing.assert_array_equal(read.tensors["output_norm.weight"], weights(canary)["model.norm.weight"])  # always float32
    half = canary.head_dim // 2
    for ours, theirs in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        got, want = read.tensors[f"blk.0.{ours}.weight"], data[f"model.layers.0.self_attn.{theirs}.weight"]
        for row in range(0, len(want), canary.head_dim):
            for pair in range(half):
                np.testing.assert_array_equal(got[row + 2 * pair], want[row + pair])
                np.testing.assert_array_equal(got[row + 2 * pair + 1], want[row + pair + half])


def test_the_command_writes_a_canary_and_says_how_to_try_it(kvref, tmp_path):
    done = kvref("canary", "make", "mine", "--gguf", "mine.gguf")
    assert (done.returncode, done.stderr) == (0, "")
    canary = huggingface.load(tmp_path / "mine")
    assert canary == Canary()
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["period"] == "48 tokens"
    assert said["cache formats that must not change any token"] == "float32, float16, bfloat16, int8, q8"
    assert said["cache formats that may change tokens"] == "float8_e4m3fn, float8_e5m2, q4"
    assert said["mine"] == said["mine.gguf"] == "1.3 MB"
    prompt = vocabulary.to_tokens(canary, said["prompt"])
    assert vocabulary.to_tokens(canary, said["expected"].removesuffix(" ...")) == repeated(prompt, canary.period, 12)
    before = {path: path.read_bytes() for path in tmp_path.glob("mine*/*")}
    assert kvref("canary", "make", "mine", "--gguf", "mine.gguf").stdout == done.stdout
    assert {path: path.read_bytes() for path in tmp_path.glob("mine*/*")} == before


def test_the_command_takes_sizes(kvref, tmp_path):
    asked = "--offsets 5,9 --windows 9,9 --context 200 --kv-heads 4 --query-heads 8 --head-dim 32 --theta 5000 --intermediate 32"
    done = kvref("canary", "make", "mine", "--architecture", "mistral", "--dtype", "float32", *asked.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert huggingface.load(tmp_path / "mine") == Canary((5, 9), False, 200, 4, 8, 32, 5000.0, (9, 9), 32)
    done = kvref("canary", "make", "mine", "--recalls")  # overwrites the folder with the weights of a recalling canary
    canary = huggingface.load(tmp_path / "mine")
    assert canary == Canary(**RECALLS)
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    prompt, says = (vocabulary.to_tokens(canary, said[name].removesuffix(" ...")) for name in ("prompt", "expected"))
    place = prompt.index(prompt[-1])
    assert says == prompt[place + 1 :][: len(says)]
    assert len(says) == 12


MISTAKES = {
    "sizes": (["new", "--kv-heads", "3"], "num_query_heads: expected a multiple of 3, got 4"),
    "recalling": (
        ["new", "--recalls", "--offsets", "2"],
        "offsets: expected 1 as the last one, before an induction head, got (2,)",
    ),
    "a list": (["new", "--offsets", "16;31"], "--offsets: expected numbers separated by commas, got '16;31'"),
    "an offset of none": (["new", "--offsets", "none"], "--offsets: expected numbers separated by commas, got 'none'"),
    "windows": (["new", "--windows", "16,"], "--windows: expected numbers or none separated by commas, got '16,'"),
    "a context without end": (["new", "--context", str(10**12)], "context: expected at most 1048576, got 1000000000000"),
    "a file": (["mine.py"], "mine.py is a file, expected a folder"),
    "a folder in a file": (["mine.py/new"], "mine.py/new: Not a directory"),
    "another's folder": (
        ["."],
        ". is not empty and is not a kvref canary: expected a new or empty folder, or an older canary",
    ),
    "a folder for a file": (["new", "--gguf", "."], "--gguf: . is a folder, expected a file"),
    "another's file": (["new", "--gguf", "mine.py"], "--gguf: mine.py exists and is not a kvref canary: expected another name"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_costs_one_line_and_nothing_is_written(kvref, tmp_path, arguments, message):
    before = sorted(path.name for path in tmp_path.iterdir())
    done = kvref("canary", "make", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"kvref: {message}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
