"""Options of the app `quantize`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from dovetail.core.compose import AppConfig


class QuantizeConfig(AppConfig):
    """Write a quantized copy of the checkpoint model.path, calibrated on text, with one layer in memory at a time. The
    same command continues an interrupted run."""

    needs: ClassVar[tuple[str, ...]] = ("engine", "model")

    output: str
    """Folder to write: config.json, safetensors, and the tokenizer's files."""
    method: Literal["rtn", "gptq", "awq", "smoothquant"] = "rtn"
    """rtn: round to nearest. gptq (Frantar et al. 2022): columns one after another, each corrects the error of those
    before. awq (Lin et al. 2023): channels scaled by their activations, then clipped. smoothquant (Xiao et al. 2022):
    outliers of activations moved into the weights, for w8a8 and fp8."""
    format: Literal["w4a16", "w8a16", "w8a8", "fp8"] | None = None
    """w4a16, w8a16: packed integer weights. w8a8: INT8 weights per output channel, INT8 activations per token. fp8: the
    same in E4M3. null: w8a8 for smoothquant, else w4a16."""
    layout: Literal["compressed-tensors", "awq", "gptq"] = "compressed-tensors"
    """Layout of the files. awq (AutoAWQ GEMM) has w4a16 alone, gptq (version 1) w4a16 and w8a16."""
    group: Literal[0, 32, 64, 128] = 128
    """Inputs that share a scale, of w4a16 and w8a16; 0: all inputs of an output channel. A layer's last group may be
    shorter."""
    symmetric: bool = True
    """Whether groups have no zero point."""
    clip: bool = False
    """rtn: choose for each group the range with the least squared error of its weights, not the largest weight. awq
    always searches, with the error of outputs."""
    act_order: Literal["none", "static", "group"] = "none"
    """gptq: order of columns. none: as they are. static, group: by decreasing activations. The groups of static are
    consecutive columns; those of group follow the order, and each column's group is stored."""
    damping: float = Field(0.01, gt=0, le=1)
    """gptq: added to the Hessian's diagonal, as a share of its mean."""
    alpha: float = Field(0.5, ge=0, le=1)
    """smoothquant: share of the difficulty that moves into the weights."""
    kv: bool = False
    """Also write scales of an FP8 KV cache, from the largest keys and values."""
    text: str | None = None
    """UTF-8 file for the calibration; null: documentation and source of Python's standard library."""
    samples: int = Field(128, ge=1)
    """Sequences of the calibration."""
    length: int = Field(2048, ge=2)
    """Tokens of a sequence, at most those of the model."""

    @model_validator(mode="after")
    def _fits(self) -> QuantizeConfig:
        packed = self.weights in ("w4a16", "w8a16")
        if self.method == "smoothquant" and packed:
            raise ValueError(
                f"method=smoothquant moves outliers of activations, and format={self.weights} keeps those in 16 bits: "
                "use w8a8 or fp8"
            )
        if self.method in ("gptq", "awq") and not packed:
            raise ValueError(f"method={self.method} makes w4a16 and w8a16, not {self.weights}: use rtn or smoothquant")
        if self.layout == "awq" and self.weights != "w4a16" or self.layout == "gptq" and not packed:
            raise ValueError(f"layout={self.layout} has no {self.weights}: use layout=compressed-tensors")
        if self.act_order != "none" and self.method != "gptq":
            raise ValueError(f"act_order={self.act_order} is an option of method=gptq, not of {self.method}")
        if self.act_order == "group" and (self.layout == "awq" or not self.group):
            raise ValueError("act_order=group needs groups, and a layout that stores them: compressed-tensors or gptq")
        if self.kv and self.layout != "compressed-tensors":
            raise ValueError(f"layout={self.layout} has no KV scales: use layout=compressed-tensors")
        return self

    @property
    def weights(self) -> str:
        return self.format or ("w8a8" if self.method == "smoothquant" else "w4a16")
