"""Options of the built-in quantizers."""

from __future__ import annotations

from typing import Literal

from dovetail.core.compose import Config, Part, Selected

ManyRows = Literal["rounded", "kept", "exact"]
"""Values of the option `many_rows`: how matmuls of many rows treat weights of 4 bits."""


class AutoConfig(Config):
    """The quantizer that reads the checkpoint, according to its config.json; none for plain weights. It gets the
    options that are set here."""

    head: Literal["auto", "plain", "fp8"] = "auto"
    """Option `head` of the chosen quantizer."""
    activations: str = "auto"
    """Option `activations` of the chosen quantizer."""
    many_rows: ManyRows = "rounded"
    """Option `many_rows` of the chosen quantizer."""


class NoneConfig(Config):
    """No quantization: weights and activations in the model's dtype."""


class Int8Config(Config):
    """W8A8: int8 weights with a scale per output channel, int8 activations with a dynamic scale per token."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down". Embedding and logits of plain
    checkpoints always do."""


class PackedConfig(Config):
    """The option that quantizers with weights of 4 bits share."""

    many_rows: ManyRows = "rounded"
    """Weights of matmuls of more than 128 rows with fp8 inputs. rounded: those of 4 bits may be rounded to E4M3 once
    more, with one scale per output, so that FP8 has its full rate. kept: the rounded weights are made at start-up and
    stay in memory, 8 bits more for each weight. exact: weights are multiplied as they are, which takes up to 2.3 times
    as long."""


class Int4Config(PackedConfig):
    """Integer weights of 4 or 8 bits with a scale for each group of inputs: those of published checkpoints
    (compressed-tensors, AWQ, GPTQ), or plain weights rounded to nearest as they load."""

    bits: Literal[4, 8] = 4
    """Bits of a weight. Quantized checkpoints have their own."""
    group: Literal[0, 32, 64, 128] = 128
    """Inputs that share a scale; 0 = whole rows. Quantized checkpoints have their own."""
    symmetric: bool = False
    """Without zero points: the codes of a group are centred on 0. Quantized checkpoints have their own."""
    activations: Literal["auto", "model", "fp8"] = "auto"
    """Format of the input of matmuls. model: the model's dtype (W4A16). fp8: E4M3 with a scale per token (W4A8). auto:
    fp8 for a checkpoint that states 8-bit floats as inputs; otherwise model."""
    head: Literal["auto", "plain", "fp8"] = "auto"
    """Format of the matrix of logits. auto: as in the checkpoint."""
    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down"."""


class FP4Config(PackedConfig):
    """4-bit floats (E2M1) with a scale for each block of inputs: those of published NVFP4 and MXFP4 checkpoints, such
    as gpt-oss, or plain weights rounded as they load."""

    block: Literal[16, 32] = 16
    """Inputs that share a scale. 16: NVFP4, scales in E4M3. 32: MXFP4, scales are powers of two. Quantized checkpoints
    have their own."""
    layers: Literal["all", "experts"] = "all"
    """Layers of a plain checkpoint that are rounded. experts: routed experts alone, as gpt-oss is published."""
    activations: Literal["auto", "model", "fp8"] = "auto"
    """Format of the input of matmuls. model: the model's dtype. fp8: E4M3 with a scale per token. auto: fp8 for a
    checkpoint that states 8-bit floats as inputs; otherwise model."""
    head: Literal["auto", "plain", "fp8"] = "auto"
    """Format of the matrix of logits. auto: as in the checkpoint."""
    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down"."""


class NF4Config(PackedConfig):
    """4-bit quantiles of the normal distribution with a scale for each block of 64 weights: those of bitsandbytes, or
    plain weights rounded as they load."""

    activations: Literal["model", "fp8"] = "model"
    """Format of the input of matmuls. model: the model's dtype. fp8: E4M3 with a scale per token."""
    head: Literal["auto", "plain", "fp8"] = "auto"
    """Format of the matrix of logits. auto: as in the checkpoint."""
    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down"."""


class GGUFConfig(PackedConfig):
    """Blocks of GGUF files (Q4_0, Q4_K, Q5_K, Q6_K, Q8_0), mixed in a file as its maker chose."""

    activations: Literal["model", "fp8"] = "model"
    """Format of the input of matmuls. model: the model's dtype. fp8: E4M3 with a scale per token."""
    mix: Literal["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"] = "Q4_K_M"
    """Types of random weights (`model.load=dummy`): those of a file of this name. Files have their own."""


class MixedConfig(Config):
    """Several quantizers in one model: by patterns of layers for a plain checkpoint, or those of the `config_groups` of
    a checkpoint of compressed-tensors."""

    layers: tuple[str, ...] = ()
    """Patterns of layer paths that have `those`, for instance "layers.*.mlp.down"."""
    those: Selected = Part("quant", default="fp8")
    """Quantizer of the layers that match."""
    rest: Selected = Part("quant", default="none")
    """Quantizer of all other layers, embedding and logits. quant=mixed again nests a third one."""
    head: Literal["auto", "plain", "fp8"] = "auto"
    """Format of the matrix of logits of a checkpoint with `config_groups`. auto: as in the checkpoint."""
    activations: str = "auto"
    """Option `activations` of the quantizers of a checkpoint with `config_groups`, of those that have it. auto: as each
    group states."""
    many_rows: ManyRows = "rounded"
    """Option `many_rows` of the quantizers of a checkpoint with `config_groups`, of those that have it."""


class FP8Config(Config):
    """W8A8 in E4M3 with dynamic scales, by default per output channel and per token. On GPUs without FP8
    matmuls, inputs keep 16 bits (W8A16)."""

    activations: Literal["auto", "fp8", "model", "plain"] = "auto"
    """Format of the input of matmuls. fp8: E4M3, which needs compute capability 8.9 (Ada, Hopper and later). model: the
    model's dtype; weights keep 8 bits and are decoded as they are read; plain: another name for it. auto: fp8, and
    model on older GPUs and for a checkpoint that states no format of inputs."""
    scales: Literal["row", "block", "tensor"] = "row"
    """Granularity of scales. row: per output channel of a weight and per token. block: per 128 x 128 block of a weight
    (DeepSeek-V3, 2024) and per token; logits have scales per row. tensor: per matrix (a rank's shard) and over all
    tokens of a step, graph padding included, or of each half of a split step. With tensor, a token's result depends on
    the others, and quantizing takes extra passes over the input. FP8 weights of a checkpoint keep their scales."""

    skip: tuple[str, ...] = ()
    """Patterns of layer paths that stay plain, for instance "layers.*.mlp.down"."""
    head: Literal["auto", "plain", "fp8"] = "auto"
    """Format of the matrix of logits. fp8: quantized like the other layers, also if an embedding is tied to it. plain:
    the model's dtype. auto: as in the checkpoint."""
    fast_accum: bool = True
    """Sum large matmuls in the tensor cores' accumulators, which have fewer bits than float32."""

    @property
    def plain_inputs(self) -> bool:
        """Whether inputs have the model's dtype by option."""
        return self.activations in ("model", "plain")
