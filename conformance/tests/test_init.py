"""`kvref init`: every family in every language, and small caches that are written into its projects and judged."""

import json
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from commandline import run_kvref

from kvref_conformance.adapter_project import FILES, check_layout, sdk_folder, write_project
from kvref_conformance.calls.operation_table import operations
from kvref_conformance.drivers.json_client import JsonClient
from kvref_conformance.families import names
from kvref_conformance.runner.harness_selftest import run_selftest

BUILDS = {
    "python": ((), "adapter:Adapter"),
    "cpp": ((["cmake", "-B", "build"], ["cmake", "--build", "build"]), "project"),
    "rust": ((["cargo", "build", "--release", "--offline"],), "project"),
    "javascript": ((), "project"),
}
TOOLS = {"python": (), "cpp": ("cmake", "g++"), "rust": ("cargo",), "javascript": ("node",)}

# A contiguous cache in each language: replacements in the written file.
CACHES = {
    "python": {
        "self.cache = None": "self.most, self.lanes = max_seq_len, [batch_size, num_kv_heads, head_dim]\n"
        '        self.keys = self.values = np.zeros((batch_size, num_kv_heads, 0, head_dim), "float32")',
        'raise NotOffered("contiguous.seq_len: not written yet")': "return self.keys.shape[2]",
        'raise NotOffered("contiguous.append: not written yet")': """
        from kvref.errors import CapacityExceeded, DtypeMismatch, ShapeMismatch

        if keys.ndim != 4 or keys.shape != values.shape or [*keys.shape[:2], keys.shape[3]] != self.lanes:
            raise ShapeMismatch
        if "float64" in (keys.dtype, values.dtype):
            raise DtypeMismatch
        if self.seq_len + keys.shape[2] > self.most:
            raise CapacityExceeded
        self.keys, self.values = np.append(self.keys, keys, 2), np.append(self.values, values, 2)""",
        'raise NotOffered("contiguous.read: not written yet")': "return self.keys, self.values",
    },
    "cpp": {
        'kvref::not_offered("contiguous.seq_len: not written yet");': "return length;",
        'kvref::not_offered("contiguous.append: not written yet");': """
        const std::int64_t count = keys.shape[2];
        if (length + count > sizes.integer("max_seq_len")) throw kvref::Error("CapacityExceeded", "the cache is full");
        add(keys, 0);
        add(values, 1);
        length += count;""",
        'kvref::not_offered("contiguous.read: not written yet");': "return {all(0), all(1)};",
        "private:\n": """private:
    void add(const kvref::Array& tokens, int which) {
        const std::size_t lanes = tokens.shape[0] * tokens.shape[1], row = tokens.numbers.size() / lanes;
        stores[which].resize(lanes);
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const auto first = tokens.numbers.begin() + lane * row;
            stores[which][lane].insert(stores[which][lane].end(), first, first + row);
        }
    }

    kvref::Array all(int which) const {
        kvref::Array found{{sizes.integer("batch_size"), sizes.integer("num_kv_heads"), length, sizes.integer("head_dim")}, {}};
        for (const std::vector<float>& lane : stores[which]) found.numbers.insert(found.numbers.end(), lane.begin(), lane.end());
        return found;
    }

    std::vector<std::vector<float>> stores[2];
    std::int64_t length = 0;
""",
    },
    "rust": {
        "struct Contiguous {}": """struct Contiguous {
    shape: [usize; 4],
    most: usize,
    stores: [Vec<Vec<f32>>; 2],
}""",
        "Ok(Contiguous {})": """let shape = [sizes.size("batch_size"), sizes.size("num_kv_heads"), 0, sizes.size("head_dim")];
        let lanes = vec![vec![]; shape[0] * shape[1]];
        Ok(Contiguous { shape, most: sizes.size("max_seq_len"), stores: [lanes.clone(), lanes] })""",
        'not_offered("contiguous.seq_len: not written yet")': "Ok(self.shape[2] as i64)",
        'not_offered("contiguous.append: not written yet")': """
        let count = keys.shape[2];
        if self.shape[2] + count > self.most {
            return refuse("CapacityExceeded", "the cache is full");
        }
        for (store, tokens) in self.stores.iter_mut().zip([keys, values]) {
            let row = count * self.shape[3];
            for (i, lane) in store.iter_mut().enumerate() {
                lane.extend(&tokens.numbers[i * row..][..row]);
            }
        }
        self.shape[2] += count;
        Ok(())""",
        'not_offered("contiguous.read: not written yet")': """
        let all = |store: &Vec<Vec<f32>>| Array::new(&self.shape, store.concat());
        Ok((all(&self.stores[0]), all(&self.stores[1])))""",
    },
    "javascript": {
        "    // Create your cache here": """    this.shape = [sizes.batch_size, sizes.num_kv_heads, 0, sizes.head_dim];
    this.most = sizes.max_seq_len;
    this.stores = [0, 1].map(() => Array.from({ length: this.shape[0] * this.shape[1] }, () => []));
    // Create your cache here""",
        'notOffered("contiguous.seq_len: not written yet");': "return this.shape[2];",
        'notOffered("contiguous.append: not written yet");': """
    const count = keys.shape[2];
    if (this.shape[2] + count > this.most) throw new KVError("CapacityExceeded", "the cache is full");
    [keys, values].forEach(({ numbers }, which) => {
      const row = count * this.shape[3];
      this.stores[which].forEach((lane, i) => numbers.subarray(i * row, (i + 1) * row).forEach((x) => lane.push(x)));
    });
    this.shape[2] += count;""",
        'notOffered("contiguous.read: not written yet");': "return this.stores.map((store) => new Tensor([...this.shape], "
        "store.flat()));",
    },
}
# A cache that accepts one token too many.
BUG = {
    "python": ("> self.most", "> self.most + 1"),
    "cpp": ('> sizes.integer("max_seq_len")', '> sizes.integer("max_seq_len") + 1'),
    "rust": ("> self.most", "> self.most + 1"),
    "javascript": ("> this.most", "> this.most + 1"),
}

languages = pytest.mark.parametrize(
    "language", [each if each == "python" else pytest.param(each, marks=pytest.mark.harness) for each in FILES]
)


def run(folder, *command):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def kvref_command(folder, *options):
    return run(folder, sys.executable, "-m", "kvref_conformance.cli", *options)


def build(folder, language):
    for command in BUILDS[language][0]:
        done = run(folder, *command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stdout + done.stderr


def replace(path, changes):
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def verdicts(folder, language, *options):
    build(folder, language)
    done = kvref_command(folder, "check", BUILDS[language][1], "--json", "results.json", "--examples", "10", *options)
    clauses = json.loads((folder / "results.json").read_text())["clauses"]
    return done, {each["clause"]: each["verdict"] for each in clauses}


@languages
def test_a_written_cache_passes_and_its_bug_breaks_the_clause_of_the_capacity(language, tmp_path):
    for tool in TOOLS[language]:
        if not shutil.which(tool):
            pytest.skip(f"no {tool} here")
    folder = tmp_path / "project"
    done = kvref_command(tmp_path, "init", "--family", "contiguous", "--language", language, "-o", "project")
    assert (done.returncode, done.stderr) == (0, "")
    done, found = verdicts(folder, language, "--clause", "CONTIG-*,LAW-1*")
    assert done.returncode == 2
    assert set(found.values()) <= {"passed", "not offered", "not applicable"}
    assert "contiguous.append: not written yet" in done.stdout

    code = folder / next(iter(FILES[language].values()))
    replace(code, CACHES[language])
    done, found = verdicts(folder, language)
    assert done.returncode == 0, done.stdout
    assert [found[f"CONTIG-{n:02}"] for n in (2, 3, 5, 6, 12, 13)] == ["passed"] * 6
    assert [found[f"LAW-{n:02}"] for n in (1, 2, 10, 11, 12)] == ["passed"] * 5

    replace(code, dict([BUG[language]]))
    done, found = verdicts(folder, language, "--clause", "CONTIG-06")
    assert done.returncode == 1
    assert found["CONTIG-06"] == "failed"


# The cache keeps the keys as it gets them; `length` is the length of their first axis.
KEEPS_KEYS = {
    "cpp": {
        "private:\n": "private:\n    kvref::Array keys;\n",
        'kvref::not_offered("windowed.append: not written yet");': "this->keys = keys;",
        'kvref::not_offered("windowed.length: not written yet");': "return keys.shape[0];",
        'kvref::not_offered("windowed.read: not written yet");': "return {keys, keys};",
    },
    "rust": {
        "struct Windowed {}": "struct Windowed {\n    keys: Vec<Array>,\n}",
        "Ok(Windowed {})": "Ok(Windowed { keys: vec![] })",
        'not_offered("windowed.append: not written yet")': "self.keys.push(keys);\n        Ok(())",
        'not_offered("windowed.length: not written yet")': "Ok(self.keys[0].shape[0] as i64)",
        'not_offered("windowed.read: not written yet")': """
        let copy = || Array::new(&self.keys[0].shape, self.keys[0].numbers.clone());
        Ok((copy(), copy()))""",
    },
    "javascript": {
        'notOffered("windowed.append: not written yet");': "this.keys = keys;",
        'notOffered("windowed.length: not written yet");': "return this.keys.shape[0];",
        'notOffered("windowed.read: not written yet");': "return [this.keys, this.keys];",
    },
}


@pytest.mark.harness
@pytest.mark.parametrize("language", KEEPS_KEYS)
def test_heads_are_the_first_axis_with_the_layout_hnd(language, tmp_path):
    for tool in TOOLS[language]:
        if not shutil.which(tool):
            pytest.skip(f"no {tool} here")
    folder = tmp_path / "project"
    folder.mkdir()
    list(write_project(folder, "windowed", language, "HND"))
    replace(folder / next(iter(FILES[language].values())), KEEPS_KEYS[language])
    build(folder, language)
    keys = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)  # 2 tokens, 3 heads
    command = {"cpp": ["./build/adapter"], "rust": ["./target/release/adapter"], "javascript": ["node", "adapter.mjs"]}[language]
    program = JsonClient(command, folder)
    cache = program.windowed(num_kv_heads=3, head_dim=5, window=7, sinks=0, chunk=0, rollback=0, dtype="float32")
    cache.append(program.asarray(keys), program.asarray(keys))
    assert cache.length == 3
    np.testing.assert_array_equal(program.to_numpy(cache.read([0, 1])[0]), keys)
    program.close()


def test_python_swaps_the_axes_with_the_layout_hnd(tmp_path):
    list(write_project(tmp_path, "windowed", "python", "HND"))
    changes = {
        'raise NotOffered("windowed.append: not written yet")': "self.cache = keys",
        'raise NotOffered("windowed.length: not written yet")': "return self.cache.shape[0]",
        'raise NotOffered("windowed.read: not written yet")': "return swap_axes(self.cache), swap_axes(self.cache)",
    }
    replace(tmp_path / "adapter.py", changes)
    keys = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    cache = runpy.run_path(str(tmp_path / "adapter.py"))["Adapter"].windowed(3, 5, 7, 0, 0, 0, "float32")
    cache.append(keys, keys)
    assert cache.length == 3
    np.testing.assert_array_equal(cache.read([0, 1])[0], keys)


@pytest.mark.parametrize("family", names())
def test_every_operation_of_every_family_is_written_in_python(family, tmp_path):
    for layout in ("NHD", "HND"):
        if check_layout(family, layout):
            continue
        folder = tmp_path / layout
        folder.mkdir()
        list(write_project(folder, family, "python", layout))
        adapter = runpy.run_path(str(folder / "adapter.py"))
        assert getattr(adapter["Adapter"], family) is adapter[family.capitalize()]
        assert set(operations(family)) <= set(dir(adapter[family.capitalize()]))


@pytest.mark.harness
@pytest.mark.parametrize("family", names())
def test_the_protocol_works_for_every_family_in_javascript(family, tmp_path):
    if not shutil.which("node"):
        pytest.skip("no node here")
    list(write_project(tmp_path, family, "javascript", "NHD"))
    steps = list(run_selftest(["node", "adapter.mjs"], tmp_path, False, 10))
    assert [step.wrong for step in steps if step.wrong] == []
    assert any(step.declined for step in steps)  # operations that need the results of others are not called
    code = (tmp_path / "adapter.mjs").read_text(encoding="utf-8")
    assert [name for name in operations(family) if f"\n        {name}: [" not in code] == []


# kernels: arrays of any dtype and reserved words; prefix: optional and nested arguments; buffers: objects that operations return.
@pytest.mark.harness
@pytest.mark.parametrize("family", ["kernels", "prefix", "buffers"])
@pytest.mark.parametrize("language", ["cpp", "rust"])
def test_families_with_rare_types_compile(language, family, tmp_path):
    tool, *options = ["g++", "-std=c++17", "-fsyntax-only", "-Isdk", "-Wall", "adapter.cpp"] if language == "cpp" else [
        "cargo", "check", "--offline", "--quiet",
    ]  # fmt: skip
    if not shutil.which(tool):
        pytest.skip(f"no {tool} here")
    list(write_project(tmp_path, family, language, "NHD"))
    done = run(tmp_path, tool, *options)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--family", "pagd", "--language", "cpp"], "--family: got 'pagd': did you mean paged?; expected one of "),
        (["--family", "paged", "--language", "cobol"], "--language: got 'cobol'; expected one of python, cpp, rust, javascript"),
        (["--language", "python"], "--family is missing: one of "),
        (["--family", "paged"], "--language is missing: one of python, cpp, rust, javascript. Example: kvref init "),
        (["--family", "blocks", "--language", "cpp", "--layout", "HND"], "--layout: the family blocks has no arrays"),
        (["--family", "blocks", "--language", "cpp", "-o", "full"], "full: expected a new or empty folder"),
    ],
)
def test_a_wrong_option_is_one_line_and_writes_nothing(options, said, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept.txt").write_text("kept")
    done = run_kvref("init", *options, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["full", "full/kept.txt"]


@pytest.mark.parametrize(
    ("language", "tool"), [("cpp", "apt install cmake g++"), ("rust", "rustup.rs"), ("javascript", "nodejs.org")]
)
def test_the_readme_names_the_tools(language, tool, tmp_path):
    list(write_project(tmp_path, "paged", language, "HND"))
    assert tool in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_the_wheel_contains_the_sdk_of_every_language():
    root = Path(__file__).parents[2]
    included = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    package = "kvref_conformance/adapter_project/sdk"
    expected = {f"conformance/harnesses/{each}/sdk": f"{package}/{each}" for each in FILES if each != "python"}
    assert included["force-include"] == expected
    assert all(sdk_folder(each).is_dir() for each in FILES if each != "python")
