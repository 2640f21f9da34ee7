"""Joining and leaving the group of ranks."""

import threading

import torch.distributed as dist
from dovetail import CapabilityError


class Connection:
    def __init__(self, config):
        super().__init__(config)
        self.group, self.aborted = None, threading.Event()

    def connect(self, rank, size, address, device):
        if device.type != "cpu":
            raise CapabilityError([f"collective=mine serves cpu, not {device}: choose another collective"])
        self.rank, self.size = rank, size
        if size > 1:
            host, _, port = address.rpartition(":")
            store = dist.TCPStore(host, int(port), size, rank == 0, wait_for_workers=False)
            store.set(f"here/{rank}", "")
            while not store.check([f"here/{other}" for other in range(size)]):
                if self.aborted.wait(self.config.poll):
                    raise RuntimeError("a rank died before the ranks were connected")
            self.group = dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, size)

    def abort(self):
        self.aborted.set()  # gloo's calls fail when a connection closes

    def close(self):
        self.group = None
