"""Several quantizers in one model."""

from __future__ import annotations

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.compose import compose
from dovetail.core.testing.model_driver import build_context
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama

from ...numerics.test_int4_checkpoints import logits

TINY = "pkg://dovetail.plugins.model.bundled/tiny"


def model(*words: str, path: str = TINY) -> Llama:
    quantizer = compose(["model=llama", f"model.path={path}", *words]).build("quant")
    checkpoint = open_checkpoint(path)
    quantizer.read_checkpoint(checkpoint)
    made = Llama(LlamaConfig(path=path), build_context(Llama.spec(LlamaConfig(path=path)), quantizer=quantizer))
    made.load(checkpoint.open())
    return made


def kinds(made: Llama) -> dict[str, str]:
    return {linear.path: type(linear.method).__name__ for linear in made._linears()}


def test_patterns_choose():
    made = model("quant=mixed", "quant.layers=[layers.*.mlp.down]", "quant@quant.rest=int4", "quant.rest.group=64")
    found = kinds(made)
    assert {name for path, name in found.items() if path.endswith("mlp.down")} == {"FP8Linear"}
    assert {name for path, name in found.items() if not path.endswith("mlp.down")} == {"RoundedLinear"}
    plain, mixed, coarse = (logits(one) for one in (model(), made, model("quant=int4", "quant.group=64")))
    assert 0 < (mixed - plain).norm() < (coarse - plain).norm()


def test_three_quantizers_nest():
    words = ("quant.layers=[layers.0.*]", "quant@quant.rest=mixed", "quant.rest.layers=[layers.1.*]")
    found = kinds(model("quant=mixed", *words, "quant@quant.rest.those=int4"))
    assert {path.split(".")[1]: name for path, name in found.items() if path.endswith("down")} | {
        "0": "FP8Linear",
        "1": "RoundedLinear",
        "2": "PlainLinear",
    } == {path.split(".")[1]: name for path, name in found.items() if path.endswith("down")}


def test_needs_of_both_are_stated():
    from dovetail.core.compose.capabilities import Host

    old = Host(device="cuda", device_count=1, compute_capability=(8, 0))
    words = ["quant=mixed", "quant.those.activations=fp8", "quant@quant.rest=int4"]
    stated = compose(words).part("quant").capabilities(old)
    assert stated.requires and stated.provides["weight_bits"] < 5
