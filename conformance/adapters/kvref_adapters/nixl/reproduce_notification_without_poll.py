"""NIXL: the bytes of a WRITE arrive, and its notification does not, until the sender reads the state of the WRITE."""

import multiprocessing
import time

import numpy as np


def sender(pipe):
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("sender", nixl_agent_config(backends=["UCX"]))
    rows = np.full(4096, 7, np.uint8)
    agent.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], "DRAM")
    pipe.send(agent.get_agent_metadata())
    receiver, start = agent.add_remote_agent(pipe.recv()), pipe.recv()
    ends = (agent.get_xfer_descs([(at, 4096, 0)], "DRAM") for at in (rows.ctypes.data, start))
    handle = agent.initialize_xfer("WRITE", *ends, receiver, b"written")
    print("transfer:", agent.transfer(handle), flush=True)
    pipe.recv()
    state = agent.check_xfer_state(handle)
    print("check_xfer_state:", state, flush=True)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    print("state:", state, flush=True)
    pipe.recv()


def wait(agent, seconds):
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        if found := agent.get_new_notifs():
            return found, f"after {time.monotonic() - start:.3f} s"
        time.sleep(0.001)
    return {}


if __name__ == "__main__":
    from nixl._api import nixl_agent, nixl_agent_config

    pipe, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=sender, args=(other,))
    process.start()
    agent = nixl_agent("receiver", nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(4096, np.uint8)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    agent.add_remote_agent(pipe.recv())
    pipe.send(agent.get_agent_metadata())
    pipe.send(memory.ctypes.data)
    print("notifications in 10 s:", wait(agent, 10), "bytes written:", int((memory == 7).sum()), flush=True)
    pipe.send("read the state")
    print("notifications in 10 s after the sender read the state:", wait(agent, 10), flush=True)
    pipe.send("end")
    process.join()
