"""LMCache's L1Manager: a reader that calls finish_read twice releases the lock of another reader."""

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager

one, other = (ObjectKey(name, "model", 0) for name in (b"one", b"other"))
layout = MemoryLayoutDesc([torch.Size([1024])], [torch.float32])
manager = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(4096, use_lazy=False, shm_name="")))  # memory for one object


def store(key, value):
    error, memory = manager.reserve_write([key], [False], layout)[key]
    if memory is not None:
        memory.tensor.fill_(value)
        error = manager.finish_write([key])[key]
    return error.name


print("store one:", store(one, 1.0))
_, read = manager.reserve_read([one])[one]  # the first reader
manager.reserve_read([one])  # the second reader
for times in (1, 2):
    print(f"finish_read number {times} of the second reader:", manager.finish_read([one])[one].name)
    print("  delete:", manager.delete([one])[one].name, "and store another:", store(other, 2.0))
    print("  the first reader reads", torch.frombuffer(read.byte_array, dtype=torch.float32).unique().tolist())
