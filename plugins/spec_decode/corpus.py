"""Text beside a row's own that `suffix` searches: what the request predicts, and outputs of earlier requests. S slots,
P tokens of a prediction with what precedes it, N tokens of the ring."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from dovetail.core.interfaces import Request, TargetView


@dataclass(slots=True)
class Corpus:
    """Tensors on the device. -1 ends each text, so that no match and no draft crosses its end."""

    predicted_SP: torch.Tensor
    """int32: the last `lead` tokens of the prompt, the prediction, and -1. P = 0 without predictions."""
    ring_N: torch.Tensor
    """int32: earlier outputs, each with -1 behind it. N = 0 without a ring."""
    owner_N: torch.Tensor
    """int64: owner of each token of the ring."""
    owner_S: torch.Tensor
    """int64: owner of each slot. Rows match outputs of their own owner alone."""
    lead: int
    """Tokens of the prompt before the prediction: most tokens of a match."""

    @classmethod
    def allocate(cls, target: TargetView, *, ring: int, prediction: int, lead: int) -> Corpus:
        device, slots = target.build.device, target.max_seqs + 1
        columns = lead + prediction + 1 if prediction else 0
        return cls(
            torch.full((slots, columns), -1, dtype=torch.int32, device=device),
            torch.full((ring,), -1, dtype=torch.int32, device=device),
            torch.zeros(ring, dtype=torch.int64, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device),
            lead,
        )


class CorpusWriter:
    """Fills a corpus while sequences come and go. All work is on the device, in the order of the steps."""

    def __init__(self, corpus: Corpus, target: TargetView) -> None:
        self.corpus, self._on_cuda = corpus, target.build.device.type == "cuda"
        self._end = torch.zeros((), dtype=torch.int64, device=target.build.device)
        """Where the next output begins in the ring."""
        self._prompts: dict[int, tuple[int, int]] = {}
        """Slot -> (length of the prompt, owner)."""

    def enter(self, slot: int, request: Request) -> None:
        corpus, owner = self.corpus, owner_of(request.cache_salt)
        self._prompts[slot] = len(request.prompt_ids), owner
        corpus.owner_S[slot].fill_(owner)
        if not corpus.predicted_SP.shape[1]:
            return
        row_P = corpus.predicted_SP[slot].fill_(-1)
        most = len(row_P) - corpus.lead - 1
        if predicted := request.params.prediction[:most]:
            before = request.prompt_ids[-corpus.lead :]
            text = torch.tensor([*before, *predicted], dtype=torch.int32, pin_memory=self._on_cuda)
            first = corpus.lead - len(before)
            row_P[first : first + len(text)].copy_(text, non_blocking=True)

    def leave(self, slot: int, tokens_L: torch.Tensor, length: torch.Tensor) -> None:
        """Add the slot's output to the ring; of one that is longer than the ring, its end. `tokens_L`, `length`: the
        slot's text, on the device."""
        corpus, size = self.corpus, len(self.corpus.ring_N)
        prompt, owner = self._prompts.pop(slot)
        if not size:
            return
        count = (length - prompt).clamp(0, size - 1)
        step_N = torch.arange(size, device=tokens_L.device)
        text_N = tokens_L[(length - count + step_N).clamp(0, len(tokens_L) - 1)]
        text_N = torch.where(step_N < count, text_N, -1)
        place_N = (self._end + step_N) % size
        written_N = step_N <= count
        corpus.ring_N[place_N] = torch.where(written_N, text_N, corpus.ring_N[place_N])
        corpus.owner_N[place_N] = torch.where(written_N, owner, corpus.owner_N[place_N])
        self._end.add_(count + 1).remainder_(size)


def owner_of(salt: str) -> int:
    """Return a 63-bit hash of a cache salt, equal on all ranks."""
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
