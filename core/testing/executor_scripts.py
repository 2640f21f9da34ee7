"""Hand-written plans for a small Llama on the CPU, and LoRA adapters for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from dovetail.core.arithmetic import ceil_div
from dovetail.core.compose import Composition, compose
from dovetail.core.interfaces import (
    HostDraft,
    Join,
    JoinBlob,
    LateInputs,
    PageDelta,
    Request,
    Row,
    SamplingParams,
    StepPlan,
)
from dovetail.core.interfaces.plan import DECODE_AND_SAMPLE, LATE, SAMPLE
from dovetail.core.worker.loader import load_rank
from dovetail.core.worker.runner import Runner

SLOTS, MAX_LEN, PAGE, VOCAB = 4, 64, 16, 97
PAGES_PER_SLOT = MAX_LEN // PAGE
SMALL_LLAMA = (
    "{architectures: [LlamaForCausalLM], hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    f"num_attention_heads: 4, num_key_value_heads: 2, vocab_size: {VOCAB}, max_position_embeddings: 128, "
    "rms_norm_eps: 1.0e-5, rope_theta: 10000.0, eos_token_id: 2, torch_dtype: float32}"
)


def small_composition(*overrides: str) -> Composition:
    """Compose the small model on the CPU with default components."""
    return compose(
        [
            "app=generate",
            "model=llama",
            "model.load=dummy",
            f"model.hf={SMALL_LLAMA}",
            "engine.device=cpu",
            "engine.dtype=float32",
            f"engine.max_seqs={SLOTS}",
            f"engine.max_len={MAX_LEN}",
            f"engine.page_size={PAGE}",
            f"engine.kv_pages={SLOTS * PAGES_PER_SLOT}",
            "engine.token_budget=64",
            *overrides,
        ]
    )


def quiet(phase: str, share: float | None) -> None:
    """Progress callback that does nothing."""


def small_runner(*overrides: str) -> Runner:
    """One rank with the small model, ready to run plans."""
    rank = load_rank(small_composition(*overrides), quiet)
    return rank.bind(rank.info.num_pages)


@dataclass
class Script:
    """Plans of a few sequences. The slot number determines the pages. Continues from where `after` ended."""

    after: Script | None = None
    steps: list[tuple[StepPlan, dict[tuple[int, int], JoinBlob]]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    """Slots in use after the last step."""
    late: dict[int, LateInputs] = field(default_factory=dict)
    """Late inputs by step."""

    def add(
        self,
        rows: Seq[Row],
        joins: Mapping[Join, Seq[int]] | None = None,
        leaves: Seq[int] = (),
        masks: Mapping[int, Seq[int]] | None = None,
        adapter: str = "",
    ) -> None:
        """Add a step. joins: known tokens of each; the first one uses `adapter`, in adapter slot 0. masks: by row, the
        tokens that it may sample."""
        before = self if self.steps else self.after
        step = before.plans[-1].step + 1 if before else 0
        if before is self.after and before:
            leaves = sorted(before.held)
        plan = StepPlan(step, list(rows), leaves=list(leaves))
        self.held = self.held - set(leaves) | {join.slot for join in joins or ()}
        blobs: dict[tuple[int, int], JoinBlob] = {}
        for join, tokens in (joins or {}).items():
            plan.joins.append(join)
            first = join.slot * PAGES_PER_SLOT + 1
            plan.pages += [PageDelta(0, join.slot, index, first + index) for index in range(PAGES_PER_SLOT)]
            key = "" if blobs else adapter
            request = Request(join.uid, tuple(tokens), SamplingParams(temperature=0.0), eos_ids=(2,), adapter=key)
            blobs[join.uid, join.epoch] = JoinBlob(request.prompt_ids, request, 0, 0 if key else -1)
        self.steps.append((plan, blobs))
        if masks is not None:
            bits = np.zeros((len(masks), ceil_div(VOCAB, 32)), np.uint32)
            for m, tokens in enumerate(masks.values()):
                for token in tokens:
                    bits[m, token // 32] |= np.uint32(1 << token % 32)
            self.late[step] = LateInputs(step, tuple(masks), bits)

    @property
    def plans(self) -> list[StepPlan]:
        return [plan for plan, _ in self.steps]


def prompt(length: int, first: int) -> tuple[int, ...]:
    return tuple((first + 7 * i * i) % VOCAB for i in range(length))


A, B, C = prompt(23, 3), prompt(5, 50), prompt(18, 11)


def decode_row(slot: int, uid: int, epoch: int, bound: int, late: int = 0) -> Row:
    """Row that decodes one token; `late` is LATE if it waits for its mask."""
    return Row(slot, uid, epoch, 1, bound, 0, DECODE_AND_SAMPLE | late)


def whole_life(after: Script | None = None) -> Script:
    """Chunks, decode rows, a slot that is reused, and a sequence that resumes in another slot."""
    script = Script(after)
    script.add([Row(0, 1, 1, 16, 16, 0, 0), Row(2, 2, 1, 5, 5, 0, SAMPLE)], {Join(0, 1, 1, 0): A, Join(2, 2, 1, 0): B})
    script.add([decode_row(2, 2, 1, 6), Row(0, 1, 1, 7, 23, 0, SAMPLE)])
    script.add([decode_row(0, 1, 1, 24), decode_row(2, 2, 1, 7)])
    script.add([decode_row(0, 1, 1, 25), Row(2, 3, 1, 18, 18, 0, SAMPLE)], {Join(2, 3, 1, 0): C}, leaves=[2])
    script.add([decode_row(0, 1, 1, 26), decode_row(2, 3, 1, 19)])
    script.add([decode_row(2, 3, 1, 20), Row(1, 1, 2, 23, 23, 0, SAMPLE)], {Join(1, 1, 2, 0): A}, leaves=[0])
    script.add([decode_row(1, 1, 2, 24), decode_row(2, 3, 1, 21)])
    return script


def alone(tokens: Seq[int], uid: int, decodes: int, after: Script | None = None) -> Script:
    """One sequence whose prompt is fed in one step."""
    script, count = Script(after), len(tokens)
    script.add([Row(0, uid, 1, count, count, 0, SAMPLE)], {Join(0, uid, 1, 0): tokens})
    for i in range(1, decodes + 1):
        script.add([decode_row(0, uid, 1, count + i)])
    return script


def with_masks(after: Script | None = None) -> Script:
    """Sequence 1 is masked, lacks its mask in one step, and is unmasked at the end. Sequence 2 is never masked."""
    script = Script(after)
    rows = [Row(0, 1, 1, 23, 23, 0, SAMPLE | LATE), Row(2, 2, 1, 5, 5, 0, SAMPLE)]
    script.add(rows, {Join(0, 1, 1, 0): A, Join(2, 2, 1, 0): B}, masks={0: (7, 40, 96)})
    for bound, masks in ((24, {0: (13,)}), (25, {}), (25, {0: (64, 65)}), (26, None)):
        late = 0 if masks is None else LATE
        mine, other = decode_row(0, 1, 1, bound, late), decode_row(2, 2, 1, 5 + len(script.steps))
        script.add([mine, other], masks=masks)
    return script


def with_masked_drafts() -> Script:
    """Sequence 1 verifies two drafts with masks, then one of two. Sequence 2 is never masked."""
    script = Script()
    rows = [Row(0, 2, 1, 5, 5, 0, SAMPLE), Row(2, 1, 1, 23, 23, 0, SAMPLE)]
    script.add(rows, {Join(0, 2, 1, 0): B, Join(2, 1, 1, 0): A})
    for bound, drafts, masks in ((26, (5, 6), ((5,), (6,), (7,))), (29, (8, 9), ((8,), (10,)))):
        mine = Row(2, 1, 1, 3, bound, 2, DECODE_AND_SAMPLE | LATE)
        script.add([decode_row(0, 2, 1, 5 + len(script.steps)), mine], masks=dict(enumerate(masks)))
        plan, step = script.plans[-1], len(script.steps) - 1
        plan.drafts.append(HostDraft(2, drafts))
        script.late[step] = replace(script.late[step], rows=(1,), drafts=(len(masks) - 1,))
    return script


def with_adapters() -> Script:
    """Two consecutive sequences with the same prompt and different adapters, and a concurrent one without."""
    script = Script()
    rows = [Row(0, 1, 1, 23, 23, 0, SAMPLE), Row(2, 2, 1, 5, 5, 0, SAMPLE)]
    script.add(rows, {Join(0, 1, 1, 0): A, Join(2, 2, 1, 0): B}, adapter="x@1")
    script.add([decode_row(0, 1, 1, 24), decode_row(2, 2, 1, 6)])
    rows = [decode_row(2, 2, 1, 7), Row(0, 3, 1, 23, 23, 0, SAMPLE)]
    script.add(rows, {Join(0, 3, 1, 0): A}, leaves=[0], adapter="y@2")
    script.add([decode_row(0, 3, 1, 24), decode_row(2, 2, 1, 8)])
    return script


def save_adapter(folder: Path, seed: int, rank: int = 4) -> None:
    """Write a LoRA adapter for the small model's down projections."""
    random = torch.Generator().manual_seed(seed)
    name = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight"
    tensors = {
        name.format(layer, factor): torch.randn(shape, generator=random)
        for layer in range(2)
        for factor, shape in (("A", (rank, 64)), ("B", (32, rank)))
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8 * rank, "target_modules": ["down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
