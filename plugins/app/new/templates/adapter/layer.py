"""Factors of one linear layer. Shapes: T tokens, I inputs, O outputs, S slots."""

import torch
from dovetail import RequestError
from dovetail.core.interfaces import LayerAdapters


class ScaledLayer(LayerAdapters):
    def __init__(self, site, slots, device, dtype):
        self.site = site
        # Slot -1 is the last row and means no adapter: factors of one.
        self.scale_SO = torch.ones(slots + 1, site.shape.out, device=device, dtype=dtype)

    def apply(self, x_TI, y_TO, slots_T):
        y_TO.mul_(self.scale_SO[slots_T])

    def read(self, file):
        """Return this rank's factors, one for the parts of the layer that the file does not name."""
        scales = [torch.ones(size) for size in self.site.shape.parts]
        for part, (name, whole) in enumerate(zip(self.site.shape.names, self.site.whole, strict=True)):
            if name in file.keys():
                tensor = file.get_slice(name)
                if tensor.get_shape() != [whole[0]]:
                    shape = tensor.get_shape()
                    raise RequestError(f"adapter: {name} has shape {shape}, this model's {whole[0]} outputs")
                scales[part] = self.site.output_share(part, tensor)
        return torch.cat(scales)
