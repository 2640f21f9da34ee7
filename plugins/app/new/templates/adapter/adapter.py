"""Factors of all layers, by adapter and slot."""

from dovetail.core.interfaces import Adapters

from dovetail_mine.file import opened
from dovetail_mine.layer import ScaledLayer


class Mine(Adapters):
    slots = 0  # until it is built

    def __init__(self, config, device, dtype):
        super().__init__(config, device, dtype)
        self.layers, self.factors, self.placed, self.slots = [], {}, {}, config.slots

    @classmethod
    def initial(cls, config):
        return config.load

    def attach(self, site):
        self.layers.append(ScaledLayer(site, self.slots, self.device, self.dtype))
        return self.layers[-1]

    def allocate(self):
        pass  # attach did

    def read(self, key, folder):
        file = opened(folder, {name for layer in self.layers for name in layer.site.shape.names})
        self.factors[key] = [layer.read(file) for layer in self.layers]

    def place(self, slot, key):
        if self.placed.get(slot) != key:
            for layer, scale_O in zip(self.layers, self.factors[key], strict=True):
                layer.scale_SO[slot] = scale_O
            self.placed[slot] = key

    def drop(self, key):
        self.factors.pop(key, None)
