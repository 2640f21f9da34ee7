"""Checkpoints: readers of model files, and the choice among them. Importing this package loads no torch."""

from dovetail.core.checkpoint.folder import FolderCheckpoint
from dovetail.core.checkpoint.located import located
from dovetail.core.checkpoint.readers import load_reader, locate, open_checkpoint, reader_problems
from dovetail.core.checkpoint.safetensors_file import open_headers, open_safetensors
from dovetail.core.interfaces.checkpoint import Checkpoint, LazyTensor, TensorHeader, WeightSource

__all__ = [
    "Checkpoint",
    "FolderCheckpoint",
    "LazyTensor",
    "TensorHeader",
    "WeightSource",
    "load_reader",
    "locate",
    "located",
    "open_checkpoint",
    "open_headers",
    "open_safetensors",
    "reader_problems",
]
