"""Random LoRA adapters in PEFT's format, and PEFT's logits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gptj": ["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"],
}


def save_adapter(folder: Path, model: torch.nn.Module, *, seed: int, **options: Any) -> None:
    """Save a LoRA with two random factors, in a folder next to the base model's checkpoint."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    options = {"r": 8, "lora_alpha": 12, "target_modules": TARGETS["llama"], **options}
    wrapped = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.15)
    wrapped.save_pretrained(folder)
    wrapped.unload()


@torch.no_grad()
def adapted_logits(model: torch.nn.Module, folder: Path, tokens: list[int]) -> torch.Tensor:
    """logits_TV of the whole sequence in one call, computed by PEFT."""
    from peft import PeftModel

    wrapped = PeftModel.from_pretrained(model, folder)
    try:
        return wrapped(torch.tensor([tokens])).logits[0].float()
    finally:
        wrapped.unload()
