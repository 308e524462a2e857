"""Any implementation as a program with the protocol: `kvref check --exec "python serve.py zoo:blocks-freed-twice"`."""

import json
import sys

import numpy as np

from kvref_conformance.calls.messages import ObjectReference, error_kinds, to_call_error
from kvref_conformance.calls.operation_table import operations, result_protocol
from kvref_conformance.drivers.reply_validation import to_plain_data
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families import names
from kvref_conformance.implementations import load_implementation
from kvref_conformance.traces.json_codec import from_wire, to_wire

implementation = load_implementation(sys.argv[1])
objects = {}


def perform(id, op, on, args):
    if op == "hello":
        objects.clear()
        said = {name: getattr(implementation, name) for name in ("name", "version", "language", "level", "formats")}
        said |= {"limits": implementation.limits} if getattr(implementation, "limits", None) else {}
        return said | {"families": [family for family in names() if hasattr(implementation, family)]}
    family, _, name = op.partition(".")
    if family not in (*names(), "buffer"):
        raise NotOffered(op)
    given = {each: own(from_wire(value)) for each, value in args.items()}
    if name == "new":
        objects[id] = getattr(implementation, family)(**given)
        return ObjectReference(id)
    operation = operations(family)[name]
    found = getattr(objects[on], name)
    if operation.attribute:
        return to_plain_data(implementation, found, operation.result, op)
    result = found(*[given.pop(each) for each in operation.parameters if each in given], **given)
    if result_protocol(operation.result):
        objects[id] = result
        return ObjectReference(id)
    return to_plain_data(implementation, result, operation.result, op)


def own(value):
    if isinstance(value, ObjectReference):
        return objects[value.id]
    return implementation.asarray(value) if isinstance(value, np.ndarray) else value


for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "bye":
        break
    try:
        reply = {"ok": to_wire(perform(request["id"], request["op"], request.get("on"), request["args"]))}
    except Exception as error:
        said = to_call_error(error)
        declined = "NotOffered" in error_kinds(error) or isinstance(error, AttributeError)
        reply = {"error": {"kind": "NotOffered" if declined else said.kind, "message": said.message}}
    print(json.dumps({"id": request["id"], **reply}), flush=True)
