"""Any implementation as a program with the protocol: `kvref check --exec "python serve.py zoo:blocks-freed-twice"`."""

import json
import sys

import numpy as np

from kvref_conformance.calls.messages import ObjectReference, error_of, kinds_of
from kvref_conformance.calls.operation_table import made_by, operations
from kvref_conformance.drivers.reply_validation import plain
from kvref_conformance.families import names
from kvref_conformance.implementations import load
from kvref_conformance.outcome import NotOffered
from kvref_conformance.traces.json_codec import from_wire, to_wire

implementation = load(sys.argv[1])
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
        return plain(implementation, found, operation.reply, op)
    result = found(*[given.pop(each) for each in operation.parameters if each in given], **given)
    if made_by(operation.reply):
        objects[id] = result
        return ObjectReference(id)
    return plain(implementation, result, operation.reply, op)


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
        said = error_of(error)
        declined = "NotOffered" in kinds_of(error) or isinstance(error, AttributeError)
        reply = {"error": {"kind": "NotOffered" if declined else said.kind, "message": said.message}}
    print(json.dumps({"id": request["id"], **reply}), flush=True)
