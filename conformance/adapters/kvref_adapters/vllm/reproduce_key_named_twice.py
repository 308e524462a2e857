"""vLLM's CPUOffloadingManager: a key named twice uses two chunks, and a load that raises keeps its changes of pins."""

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

KEYS = [make_offload_key(bytes([n]), 0) for n in range(4)]


def stored(num_chunks, *keys):
    manager = CPUOffloadingManager(num_chunks=num_chunks)
    manager.prepare_store(keys, ReqContext(req_id="first"))
    manager.complete_store(keys, ReqContext(req_id="first"))
    return manager


manager, twice, request = CPUOffloadingManager(num_chunks=2), [KEYS[1], KEYS[1]], ReqContext(req_id="twice")
print("one key, named twice: keys to store", len(manager.prepare_store(twice, request).keys_to_store))
manager.complete_store(twice, request, success=False)
print("after that store failed: room for two others:", manager.prepare_store(KEYS[2:], ReqContext(req_id="others")) is not None)

manager = stored(1, KEYS[1])
try:
    manager.prepare_load([KEYS[1], KEYS[2]], ReqContext(req_id="load"))
except AssertionError as error:
    print("prepare_load of a stored and a missing key: AssertionError:", str(error)[:5])
print("then room for another:", manager.prepare_store([KEYS[3]], ReqContext(req_id="other")) is not None)

manager = stored(2, KEYS[1], KEYS[2])
manager.prepare_load([KEYS[1]], ReqContext(req_id="load"))
for keys in ([KEYS[1], KEYS[2]], [KEYS[1]]):
    try:
        manager.complete_load(keys, ReqContext(req_id="load"))
    except AssertionError as error:
        print("complete_load of", len(keys), "keys, one of which is being loaded: AssertionError:", str(error)[-20:])

print("a manager of -1 chunks:", type(CPUOffloadingManager(num_chunks=-1)).__name__)
