"""LMCache's L1Manager: a writer whose reservation has expired, and the writer that gets its memory."""

import time

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager

key, layout = ObjectKey(b"chunk", "model", 0), MemoryLayoutDesc([torch.Size([1024])], [torch.float32])
for seconds in (0, 2):
    memory = L1MemoryManagerConfig(16 * 4096, use_lazy=False, shm_name="")
    manager = L1Manager(L1ManagerConfig(memory, write_ttl_seconds=1))
    print(f"the second writer comes after {seconds} s; the reservation lasts 1 s")
    error, first = manager.reserve_write([key], [False], layout, "storage_manager")[key]
    first.tensor.fill_(1)
    time.sleep(seconds)
    error, second = manager.reserve_write([key], [False], layout, "storage_manager")[key]
    print("  reserve_write of the second:", error.name, "with the memory of the first" if second is first else "")
    if second is not None:
        second.tensor[:512] = 2  # half of its rows
    print("  finish_write of the first:", manager.finish_write([key], "storage_manager")[key].name)
    error, found = manager.reserve_read([key])[key]
    print("  reserve_read of a reader:", error.name, found.tensor.unique().tolist() if found else "")
    if second is not None:
        print("  finish_write of the second:", manager.finish_write([key], "storage_manager")[key].name)
    manager.close()
