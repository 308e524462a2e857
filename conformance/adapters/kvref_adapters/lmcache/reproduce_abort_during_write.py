"""LMCache's asynchronous PD backend over NIXL with TCP: a request that is cancelled while its chunks are being written."""

import multiprocessing
import os
import signal
import socket
import time
from types import SimpleNamespace

os.environ["UCX_TLS"] = "tcp,self"  # with shared memory, the write is over before the sender can cancel

import torch
import zmq
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.pd_backend_async import PDBackendAsync

HOST, CHUNKS, TOKENS, LAYERS, HEADS, DIM = "127.0.0.1", 16, 256, 8, 8, 128  # a prompt of 16 chunks of 16 MiB fills the receiver
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * DIM])


def new_backend(role, init, alloc, proxy):
    peer = {"pd_peer_host": HOST, "pd_peer_init_port": [init], "pd_peer_alloc_port": [alloc]} if role == "receiver" else {}
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS, local_cpu=False, enable_pd=True, pd_role=role, transfer_channel="nixl", nixl_backends=["UCX"],
        pd_buffer_device="cpu", pd_buffer_size=CHUNKS * SHAPE.numel() * 4,
        pd_proxy_host=HOST, pd_proxy_port=proxy, **peer)  # fmt: skip
    return PDBackendAsync(config, LMCacheMetadata("model", 1, 1, 0, 0, torch.float32, (LAYERS, 2, TOKENS, HEADS, DIM)))


def keys_of(prompt):
    return [CacheEngineKey("model", 1, 0, 100 * prompt + at, torch.float32) for at in range(CHUNKS)]


def send(sender, prompt, value, init, alloc):
    chunks = [sender.allocate(SHAPE, torch.float32, MemoryFormat.KV_2LTD) for _ in range(CHUNKS)]
    for each in chunks:
        each.tensor.fill_(value)
    spec = SimpleNamespace(
        req_id=f"prompt {prompt}", receiver_host=HOST, receiver_init_port=[init], receiver_alloc_port=[alloc],
        is_last_prefill=True, total_chunks=CHUNKS)  # fmt: skip
    sender.batched_submit_put_task(keys_of(prompt), chunks, spec)
    return chunks


def send_and_cancel(cancel, ports):
    sender = new_backend("sender", *ports)
    chunks = send(sender, 1, 7.0, *ports[:2])
    if cancel:
        while not sender._sent_keys.get("prompt 1"):  # until the chunks have addresses, and are being written
            time.sleep(0.0001)
        sender.cancel_request("prompt 1")
        while "prompt 1" in sender._req_receiver:  # until the decode engine has replied
            time.sleep(0.0001)
        os.kill(os.getpid(), signal.SIGSTOP)  # this process stalls
    time.sleep(600)
    return chunks


def main():
    sockets = [socket.create_server((HOST, 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    proxy = zmq.Context.instance().socket(zmq.PULL)
    proxy.bind(f"tcp://{HOST}:{ports[2]}")
    receiver, sender = new_backend("receiver", *ports), new_backend("sender", *ports)
    for cancel in (False, True):
        process = multiprocessing.get_context("spawn").Process(target=send_and_cancel, args=(cancel, ports))
        process.start()
        if cancel:
            os.waitpid(process.pid, os.WUNTRACED)
        else:
            proxy.recv()  # all chunks of the first prompt were written
            for key in keys_of(1):
                receiver.remove(key)
        chunks = send(sender, 2, 9.0, *ports[:2])
        proxy.recv()
        wrong = []
        for _ in range(2):
            wrong.append(sum(bool((receiver.get_blocking(each).tensor != 9).any()) for each in keys_of(2)))
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(2)
        how = "cancelled while it was written" if cancel else "read after it was written"
        print(f"first prompt {how}; wrong chunks of the second: {wrong[0]} when it is complete, {wrong[1]} later", flush=True)
        process.kill()
        for key, chunk in zip(keys_of(2), chunks, strict=True):
            receiver.remove(key)
            chunk.ref_count_down()
    os._exit(0)  # the threads of the backends go on


if __name__ == "__main__":
    main()
