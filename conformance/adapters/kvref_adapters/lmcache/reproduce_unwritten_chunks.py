"""LMCache's PD backends over NIXL on a CPU: chunks that are reported as sent, or read, before the sender has written them."""

import multiprocessing
import os
import socket
import time
from types import SimpleNamespace

import msgspec
import torch
import zmq
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.pd_backend import PDBackend, ProxyNotif
from lmcache.v1.storage_backend.pd_backend_async import PDBackendAsync

HOST, CHUNKS, TOKENS, LAYERS, HEADS, DIM = "127.0.0.1", 16, 256, 8, 8, 128  # a prompt of 16 chunks of 16 MiB
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * DIM])


def new_backend(mode, role, ports):
    init, alloc, query, proxy = ports
    peer = {"pd_peer_host": HOST, "pd_peer_init_port": [init], "pd_peer_alloc_port": [alloc]} if role != "sender" else {}
    if mode == "sync" and role == "receiver":
        peer["pd_peer_query_port"] = [query]
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS, local_cpu=False, enable_pd=True, pd_backend_mode=mode, pd_role=role, transfer_channel="nixl",
        pd_buffer_device="cpu", pd_buffer_size=(4 if role == "receiver" else 1) * CHUNKS * SHAPE.numel() * 4,
        nixl_backends=["UCX"], pd_proxy_host=HOST, pd_proxy_port=proxy, **peer)  # fmt: skip
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.float32, (LAYERS, 2, TOKENS, HEADS, DIM))
    return {"sync": PDBackend, "async": PDBackendAsync}[mode](config, metadata)


def keys_of(prompt):
    return [CacheEngineKey("model", 1, 0, 100 * prompt + at, torch.float32) for at in range(CHUNKS)]


def buffers(backend, value):
    made = [backend.allocate(SHAPE, torch.float32, MemoryFormat.KV_2LTD) for _ in range(CHUNKS)]
    for each in made:
        each.tensor.fill_(value)
    return made


def send(backend, prompt, name, ports, chunks):
    init, alloc, query, _ = ports
    spec = SimpleNamespace(
        req_id=name, receiver_host=HOST, receiver_init_port=[init], receiver_alloc_port=[alloc], receiver_query_port=[query],
        is_last_prefill=True, total_chunks=CHUNKS)  # fmt: skip
    backend.batched_submit_put_task(keys_of(prompt), chunks, spec)
    return spec


def send_and_wait(mode, prompt, ports):
    sender = new_backend(mode, "sender", ports)
    chunks = buffers(sender, 7.0)
    send(sender, prompt, "first", ports, chunks)
    time.sleep(600)  # until this process is killed


def run(mode):
    sockets = [socket.create_server((HOST, 0)) for _ in range(4)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    proxy = zmq.Context.instance().socket(zmq.PULL)
    proxy.bind(f"tcp://{HOST}:{ports[3]}")
    receiver = new_backend(mode, "receiver", ports)
    one, other = (new_backend(mode, "sender", ports) for _ in range(2))
    chunks = {each: buffers(each, 7.0) for each in (one, other)}

    def completed(prompt):
        """Wait until the proxy is told that a request is complete. Returns its name and the number of its unwritten chunks."""
        name = msgspec.msgpack.decode(proxy.recv(), type=ProxyNotif).req_id
        ends = [receiver.get_blocking(key).tensor.view(-1)[-1].item() for key in keys_of(prompt)]
        return f"{name} complete with {sum(end != 7 for end in ends)} unwritten chunks"

    send(one, 1, "first", ports, chunks[one])
    said = [completed(1)]
    send(other, 1, "second", ports, chunks[other])
    print(mode, "two senders, the second when the first is complete:", *said, completed(1), sep="; ", flush=True)

    send(one, 2, "first", ports, chunks[one])
    send(other, 2, "second", ports, chunks[other])
    print(mode, "two senders at once:", completed(2), completed(2), sep="; ", flush=True)

    process = multiprocessing.get_context("spawn").Process(target=send_and_wait, args=(mode, 3, ports))
    process.start()
    while not receiver.contains(keys_of(3)[-1]):
        time.sleep(0.0001)
    process.kill()
    process.join()
    time.sleep(3)
    send(other, 3, "second", ports, chunks[other])
    print(mode, "3 s after the first sender was killed:", completed(3), sep="; ", flush=True)

    if mode == "sync":
        reader = new_backend(mode, "both", ports)
        for prompt, when in ((1, "later"), (4, "at once")):
            found = buffers(reader, 0.0)
            spec = send(one, prompt, "first", ports, chunks[one])
            if when == "later":
                completed(prompt)
            count = reader.batched_submit_read_task(keys_of(prompt), found, spec)
            wrong = sum(bool((each.tensor != 7).any()) for each in found)
            print(mode, f"a third engine reads the prompt {when}: {count} cached chunks, {wrong} wrong", sep="; ", flush=True)
            for each in found:
                each.ref_count_down()


if __name__ == "__main__":
    for each in ("sync", "async"):
        run(each)
    os._exit(0)  # the threads of the backends go on
