"""`python run.py app=quantize`: write a quantized copy of a checkpoint.

Shapes: S sequences, L positions, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import App, Progress
from dovetail.plugins.app.quantize.config import QuantizeConfig
from dovetail.plugins.app.waiting import bar, line_console, phases_in_lines

if TYPE_CHECKING:
    import torch

    from dovetail.core.compose import Composition
    from dovetail.core.interfaces import Checkpoint, ModelSpec
    from dovetail.plugins.app.quantize.calibration import BlockStatistics
    from dovetail.plugins.app.quantize.decoder import Decoder
    from dovetail.plugins.app.quantize.folder import OutputFolder


class QuantizeApp(App):
    config: QuantizeConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        import torch

        from dovetail.core.worker.dtypes import resolve_device
        from dovetail.plugins.app.quantize.decoder import Decoder
        from dovetail.plugins.app.quantize.folder import OutputFolder

        model = composition.part("model")
        spec, source = model.target().spec(model.config), model.target().source(model.config)
        checkpoint = source.weights
        if checkpoint is None or not checkpoint.path.is_dir():
            raise ConfigError("app=quantize reads a checkpoint: set model.path=<its folder>, without model.load=dummy")
        hf, folder = checkpoint.config(), checkpoint.path
        if hf.get("quantization_config") is not None:
            raise ConfigError(f"{folder}: it has a quantization_config, and app=quantize reads plain weights")
        self.console = line_console()
        self.device = resolve_device(composition.engine.device, 0, composition.engine.first_gpu)
        self.tensors = _openers(checkpoint)
        decoder = Decoder.read(spec)
        self._check(spec)
        sequences_SL = self._sequences(spec, checkpoint)
        output = OutputFolder(self.config.output, self._settings(folder), spec.layers)
        if output.finished:
            self.console.print(f"{output.path} is finished, with the same options", markup=False)
            return 0
        with torch.inference_mode():
            self._layers(decoder, output, sequences_SL)
            outside = {n: open_() for n, open_ in self.tensors.items() if not n.startswith("model.layers.")}
        from dovetail.plugins.app.quantize.writing import quantization_config

        output.finish(outside, {**hf, "quantization_config": quantization_config(self.config)}, folder)
        self.console.print(f"{spec.layers} layers are in {output.path}", markup=False)
        return 0

    @property
    def _calibrates(self) -> bool:
        return self.config.method != "rtn" or self.config.kv

    def _settings(self, folder: Path) -> dict[str, Any]:
        """Return what the result depends on."""
        files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in folder.glob("*.safetensors")}
        text = (
            None
            if self.config.text is None or not self._calibrates
            else Path(self.config.text).expanduser().stat().st_mtime_ns
        )
        chosen = self.config.model_dump(mode="json", exclude={"output"})
        return {**chosen, "files": files, "text_mtime": text}

    def _check(self, spec: ModelSpec) -> None:
        """Raise ConfigError for matrices that the layout cannot store."""
        if self.config.layout == "compressed-tensors":
            return
        heads, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        each = 8 if self.config.weights == "w4a16" else 4
        for size in (spec.hidden, heads, kv, spec.intermediate):
            if size % each:
                raise ConfigError(
                    f"quantize.layout={self.config.layout} packs {each} codes in a word, and a layer has {size} "
                    "inputs or outputs: use layout=compressed-tensors"
                )

    def _sequences(self, spec: ModelSpec, checkpoint: Checkpoint) -> torch.Tensor | None:
        from dovetail.plugins.app.quantize.calibration import read_sequences

        if not self._calibrates:
            return None
        wanted, length = self.config.samples, min(self.config.length, spec.max_len)
        sequences_SL = read_sequences(self.config.text, checkpoint, wanted, length)
        if len(sequences_SL) < wanted:
            self.console.print(f"note: the text has {len(sequences_SL)} sequences of {length} tokens, not {wanted}")
        return sequences_SL

    def _layers(self, decoder: Decoder, output: OutputFolder, sequences_SL: torch.Tensor | None) -> None:
        import torch.nn.functional as F

        from dovetail.plugins.app.quantize.decoder import EMBEDDING

        hidden_SLC = output.hidden
        if hidden_SLC is None and sequences_SL is not None:
            hidden_SLC = F.embedding(sequences_SL, self.tensors[EMBEDDING]())
        if output.done:
            self.console.print(f"{output.done} of {output.layers} layers are in {output.path}", markup=False)
        with (
            bar(self.console, "quantize", output.layers, left=True) as update,
            phases_in_lines(self.console, "quantizing") as progress,
        ):
            update(completed=output.done)
            for index in range(output.done, output.layers):
                tensors, hidden_SLC = self._layer(decoder, index, hidden_SLC, progress)
                output.write_layer(index, tensors, hidden_SLC)
                update(advance=1)

    def _layer(
        self, decoder: Decoder, index: int, hidden_SLC: torch.Tensor | None, progress: Progress
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Return (the tensors of a quantized layer by their names in the checkpoint, its output)."""
        from dovetail.plugins.app.quantize.calibration import BlockStatistics
        from dovetail.plugins.app.quantize.decoder import LAYER, LINEARS
        from dovetail.plugins.app.quantize.methods import grid_of, quantize_block
        from dovetail.plugins.app.quantize.writing import kv_scales, tensors_of

        prefix, statistics = LAYER.format(index), BlockStatistics()
        layer = f"layer {index + 1} of {decoder.spec.layers}"
        weights = {
            name.removeprefix(prefix): open_().to(self.device)
            for name, open_ in self.tensors.items()
            if name.startswith(prefix)
        }
        if absent := [name for name in LINEARS if f"{name}.weight" not in weights]:
            raise ConfigError(f"the checkpoint has no {prefix}{absent[0]}.weight")
        dtype = weights[f"{LINEARS[0]}.weight"].dtype
        if hidden_SLC is not None:
            _run(decoder, index, weights, hidden_SLC, self.device, partial(progress, f"{layer}, calibrate"), statistics)
        progress(f"{layer}, quantize", None)
        quantized, others = quantize_block(self.config, grid_of(self.config, dtype), weights, statistics)
        if hidden_SLC is not None:
            values = {f"{name}.weight": found.values(dtype) for name, found in quantized.items()}
            outputs = partial(progress, f"{layer}, inputs of the next one")
            hidden_SLC = _run(decoder, index, {**others, **values}, hidden_SLC, self.device, outputs)
        made = {f"{name}.{part}": x for name, q in quantized.items() for part, x in tensors_of(self.config, q).items()}
        scales = kv_scales(statistics.largest) if self.config.kv else {}
        return {prefix + name: x for name, x in {**others, **made, **scales}.items()}, hidden_SLC


def _openers(checkpoint: Checkpoint) -> dict[str, Callable[[], torch.Tensor]]:
    def reader(open_: Callable[[], Any]) -> Callable[[], torch.Tensor]:
        return lambda: open_()[...]

    return {name: reader(open_) for name, open_ in checkpoint.open()}


def _run(
    decoder: Decoder,
    index: int,
    weights: dict[str, torch.Tensor],
    hidden_SLC: torch.Tensor,
    device: torch.device,
    progress: Callable[[float], None],
    statistics: BlockStatistics | None = None,
) -> torch.Tensor:
    """Run a block on one sequence after another. Returns its output, on the host. `progress` is called with the share
    of sequences that are done."""
    import torch

    table_LR = decoder.table(hidden_SLC.shape[1], device)
    seen = {} if statistics is None else {"seen": statistics}
    outputs: list[torch.Tensor] = []
    for x_LC in hidden_SLC:
        progress(len(outputs) / len(hidden_SLC))
        outputs.append(decoder.run(index, weights, x_LC[None].to(device), table_LR, **seen).cpu())
    return torch.cat(outputs)
