"""kvref's schema validation gives the same result as jsonschema, for any document."""

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvref_conformance.json_schema import MAX_DEPTH, read_schema, schema_mismatch
from kvref_conformance.traces.format import SCHEMA

text = st.text(st.characters(exclude_categories=()), max_size=3)  # includes unpaired surrogates, which JSON can contain
names = st.sampled_from(["id", "ok", "error", "kind", "kinds", "message", "dtype", "shape", "base64", "handle", "number", "any"])
scalars = st.none() | st.booleans() | st.integers() | st.integers(2**63, 2**70) | st.floats() | text | names
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | text, inner, max_size=3), max_leaves=8
)


@pytest.mark.parametrize("part", ["header", "request", "reply"])
@given(document=values | st.builds(lambda more: {"id": 1, "op": "paged.new", "args": {}} | more, st.dictionaries(names, values)))
def test_whether_a_document_is_as_it_must_be(part, document):
    alone = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{part}", "$defs": read_schema(*SCHEMA)["$defs"]})
    assert (schema_mismatch(document, *SCHEMA, part) == "") == alone.is_valid(document)


@pytest.mark.parametrize("ok", [2, {"x": [1.5, float("nan"), 10**400, "\ud800"]}, {"\ud800": 1}])
def test_a_reply_that_is_one(ok):
    assert schema_mismatch({"id": 1, "ok": ok}, *SCHEMA, "reply") == ""


@pytest.mark.parametrize("levels", [MAX_DEPTH, 5_000, 200_000])
def test_a_document_without_a_bottom_is_not_gone_into(levels):
    document = []
    for _ in range(levels):
        document = [document]
    assert schema_mismatch({"id": 1, "ok": document}, *SCHEMA, "reply") == "nested too deeply to be read"
    while document:  # taken apart, because freeing it as a whole needs as deep a stack
        document = document.pop()
