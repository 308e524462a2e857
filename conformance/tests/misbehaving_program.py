"""A block pool as a program that misbehaves in one way: `kvref check --exec "python misbehaving_program.py half-a-line"`.

The misbehavior starts at the second freed block of a call trace, or at another number, so that other clauses pass. A way that
begins with `hello-` starts at once.
"""

import json
import os
import signal
import sys
import time

HELLO = {"name": "pool", "version": "1", "language": "python", "level": "exact", "formats": [], "families": ["blocks"]}
way, after = [*sys.argv[1:], *("well", "2")[len(sys.argv) - 1 :]]
pools, freed = {}, 0
JUDGE = int(os.environ.get("JUDGE", os.getppid()))  # a wrapper can be between the judge and this process


def say(line):
    sys.stdout.write(line)
    sys.stdout.flush()


def reply(message):
    say(json.dumps(message) + "\n")


class Refused(Exception):
    def __init__(self, kind):
        self.kind = kind


class Pool:
    def __init__(self, num_blocks):
        if way == "takes-anything":
            num_blocks = num_blocks if isinstance(num_blocks, int) and num_blocks >= 0 else 0
        if not isinstance(num_blocks, int) or num_blocks < 0:
            raise Refused("ConfigError")
        if not 10 <= num_blocks <= 20 and "limits" in HELLO:
            raise Refused("ConfigError")
        self.num_blocks, self.held = num_blocks, set()

    num_used = property(lambda self: len(self.held))
    num_free = property(lambda self: "five" if way == "says-words" else self.num_blocks - len(self.held))
    utilization = property(lambda self: self.num_used / self.num_blocks if self.num_blocks else 0)

    def allocate(self):
        if way == "raises":
            raise Refused("Segfault")
        for block in range(self.num_blocks):
            if block not in self.held:
                self.held.add(block)
                return block
        raise Refused("OutOfBlocks")

    def free(self, block):
        global freed
        if block not in self.held:
            raise Refused("BlockNotAllocated")
        self.held.remove(block)
        freed += 1


def perform(request):
    global freed
    op, args = request["op"], request["args"]
    if op == "hello":
        if way == "hello-hangs-again" and pools:
            time.sleep(60)
        if way != "remembers":
            pools.clear()
        freed = 0
        return HELLO
    if op == "blocks.new":
        pools[request["id"]] = Pool(**args)
        return {"handle": request["id"]}
    if op == {"declines": "blocks.utilization", "declines-more": "blocks.allocate"}.get(way):
        raise Refused("NotOffered")
    if not op.startswith("blocks.") or op in ("blocks.allocate_many", "blocks.share", "blocks.references"):
        if way == "knows-everything":
            return None
        raise Refused("NotOffered")
    if request.get("on") not in pools:
        raise Refused("NoSuchObject")
    found = getattr(pools[request["on"]], op.partition(".")[2])
    return found(**args) if callable(found) else found


def half(id):
    return json.dumps({"id": id, "ok": None})[:-8]


WAYS = {
    "garbage": lambda id: say("Segmentation fault (not really)\n"),
    "chatter": lambda id: say("and another thing\n" * 500),
    "not-an-object": lambda id: reply([1, 2]),
    "half-a-line": lambda id: (say(half(id)), time.sleep(60)),
    "half-a-line-and-gone": lambda id: (say(half(id)), os._exit(3)),
    "wrong-id": lambda id: reply({"id": id - 1, "ok": None}),
    "no-id": lambda id: reply({"ok": None}),
    "both": lambda id: reply({"id": id, "ok": None, "error": {"kind": "OutOfBlocks"}}),
    "nothing": lambda id: reply({"id": id}),
    "error-without-kind": lambda id: reply({"id": id, "error": "no"}),
    "bad-array": lambda id: reply({"id": id, "ok": {"dtype": "float32", "shape": [3], "base64": "AAAA"}}),
    "long-line": lambda id: reply({"id": id, "ok": "x" * (2**26 + 2**16)}),
    "exits": lambda id: (print("out of luck", file=sys.stderr), os._exit(3)),
    "killed": lambda id: os.kill(os.getpid(), signal.SIGSEGV),
    "closes-its-pipe": lambda id: (os.close(1), time.sleep(60)),
    "hangs": lambda id: time.sleep(60),
    "interrupts": lambda id: (os.kill(JUDGE, signal.SIGINT), time.sleep(60)),
    "terminates": lambda id: (os.kill(JUDGE, signal.SIGTERM), time.sleep(60)),
    "allocates": lambda id: bytearray(5 * 2**30),
}


if way == "hello-without-families":
    del HELLO["families"]
if way == "hello-odd-family":
    HELLO["families"] = ["blocks", "caches"]
if way == "hello-odd-limits":
    HELLO["limits"] = {"num_blocks": "many"}
if way == "hello-limits-of-the-wrong-type":
    HELLO["limits"] = ["num_blocks"]
if way == "hello-limited":  # declares limits, and raises outside them
    HELLO["limits"] = {"num_blocks": {"least": 10, "most": 20}}
if way == "hello-garbage":
    say("Welcome to pool 1.0!\n")
if way == "hello-exits":
    sys.exit("pool: no device")
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "bye":
        if way == "stays":
            time.sleep(60)
        sys.exit(9 if way == "leaves-badly" else 0)
    try:
        result = {"ok": perform(request)}
    except Refused as refused:
        result = {"error": {"kind": refused.kind, "message": "refused"}}
    if freed >= int(after) and way in WAYS:
        WAYS[way](request["id"])
    else:
        reply({"id": request["id"], **result})
