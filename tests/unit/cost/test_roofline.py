"""cost=roofline against values computed by hand, and the variants of conf/cost."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest

from dovetail.core.compose import (
    AppConfig,
    Capabilities,
    Component,
    Config,
    EngineConfig,
    Host,
    Registry,
    compose,
    installed,
)
from dovetail.core.compose.registry import Package, Registered
from dovetail.core.engine.cost import bind_cost
from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.errors import ConfigError, PluginError
from dovetail.core.interfaces import Formats, ModelSpec, Row, RowFlag, RowWork, StepPlan
from dovetail.core.ops import packed_tiles
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.plugins.cost.config import RooflineConfig
from dovetail.plugins.cost.roofline import MOST_EXACT_ROWS, ROUNDING_SHARE, Roofline

VARIANTS = ["h200", "h100", "a100", "l40s", "cpu"]


class PlanConfig(AppConfig):
    needs: ClassVar = ("engine", "model", "quant", "cost")


class Empty(Config):
    pass


def fp8(config, host):
    return Capabilities(provides={"weight_bits": 8.0, "product": "fp8"})


def component(kind, name, config=Empty, **more):
    made = Component(kind=kind, name=name, config=config, target="nowhere:Nothing", api=f"{kind}/0.1", **more)
    return Registered(made, Package("probe", "1.0"))


@pytest.fixture(scope="module")
def cost_of():
    """Return cost_of(*overrides), which gives the bound cost model of a composition."""
    builtin = installed()
    extra = (
        component("app", "probe", PlanConfig),
        component("quant", "fp8_here", capabilities=f"{__name__}:fp8"),
        component("quant", "silent"),
    )
    registry = Registry([*builtin.registered.values(), *extra], config_dirs=builtin.config_dirs)

    def build(*overrides, device=None, here=None):
        composition = compose(["app=probe", *overrides], registry=registry)
        model = composition.part("model")
        return bind_cost(composition, model.target().spec(model.config), device, here)

    return build


@pytest.mark.parametrize(
    ("model", "billions"), [("llama3_8b", 8.03), ("llama3_70b", 70.55), ("mixtral_8x7b", 46.7), ("deepseek_v3", 671.0)]
)
def test_weight_bytes(cost_of, model, billions):
    assert cost_of(f"model={model}", "cost=h200").weight_bytes() == pytest.approx(2e9 * billions, rel=0.005)


def test_kv_bytes(cost_of):
    assert cost_of("model=llama3_70b", "cost=h200").kv_bytes(1) == 327_680
    assert cost_of("model=llama3_70b", "cost=h200", "engine.tp=8").kv_bytes(1000) == 327_680 * 1000 / 8
    assert cost_of("model=deepseek_v3", "cost=h200", "engine.tp=8").kv_bytes(1) == 70_272


def test_decoding_one_row_reads_the_weights(cost_of):
    cost = cost_of("model=llama3_8b", "cost=h200")
    reading = cost.step_weight_bytes(1) / 4.4e12
    assert reading < cost.decode_seconds(1, 128) < 1.3 * reading
    assert cost.decode_seconds(16, 128) < 1.1 * cost.decode_seconds(1, 128)


def test_a_long_context_adds_what_its_keys_and_values_take(cost_of):
    cost = cost_of("model=llama3_8b", "cost=h200")
    added = cost.decode_seconds(32, 32_768) - cost.decode_seconds(32, 1)
    assert added == pytest.approx(32 * 131_072 * 32_767 / (4.4e12 * 0.8))


def test_a_long_prompt_is_bound_by_matmuls(cost_of):
    cost = cost_of("model=llama3_8b", "cost=h200")
    tokens = 8192
    products = 2 * 6.98e9 * tokens / 700e12
    attention = 32 * 4 * 32 * 128 * tokens * tokens / 2 / (700e12 * 0.6)
    assert cost.prefill_seconds(tokens, chunk=tokens) == pytest.approx(products + attention, rel=0.02)
    assert cost.prefill_seconds(2 * tokens, chunk=tokens) > 2 * cost.prefill_seconds(tokens, chunk=tokens)
    assert cost.prefill_seconds(tokens, chunk=512) > cost.prefill_seconds(tokens, chunk=tokens)
    assert cost.prefill_seconds(1000, cached=7192) < cost.prefill_seconds(tokens) / 4
    assert cost.prefill_seconds(0) == 0.0


def test_chunks_are_those_of_the_token_budget(cost_of):
    cost = cost_of("model=llama3_8b", "cost=h200", "engine.token_budget=1000")
    steps = [RowWork(1000, 1300, 0), RowWork(1000, 2300, 0), RowWork(500, 2800, 1)]
    assert cost.prefill_seconds(2500, cached=300) == pytest.approx(sum(cost.step_seconds([row]) for row in steps))


def test_fp8_halves_reads_and_nearly_halves_matmuls(cost_of):
    plain, fp8 = (cost_of("model=llama3_70b", "cost=h200", *q) for q in ((), ("quant=fp8_here",)))
    assert fp8.weight_bytes() == pytest.approx(plain.weight_bytes() / 2, rel=0.04)
    assert fp8.decode_seconds(1, 128) < 0.57 * plain.decode_seconds(1, 128)
    assert fp8.prefill_seconds(8192) < 0.68 * plain.prefill_seconds(8192)


def test_prompts_of_w4a8_have_the_rate_of_fp8_after_their_weights_are_decoded(cost_of):
    four, eight, plain = (
        cost_of("model=llama3_8b", "cost=h200", f"quant={quant}") for quant in ("w4a8", "fp8", "int4")
    )
    few, some, many = ([RowWork(rows, 512 + rows, 0)] for rows in (MOST_EXACT_ROWS, MOST_EXACT_ROWS + 1, 2048))
    assert MOST_EXACT_ROWS == packed_tiles.MOST_EXACT_ROWS
    assert four.terms(few).products == eight.terms(few).products
    assert four.terms(some).products == pytest.approx((1 + ROUNDING_SHARE) * eight.terms(some).products)
    decoding = 6.98e9 * (4.1875 / 8 + 1) / 4.4e12
    assert four.terms(many).products - eight.terms(many).products == pytest.approx(decoding, rel=1e-3)
    assert four.prefill_seconds(8192) < 0.75 * plain.prefill_seconds(8192)
    exact = cost_of("model=llama3_8b", "cost=h200", "quant=w4a8", "quant.many_rows=exact")
    assert exact.terms(few) == four.terms(few)
    assert four.terms(some).products < exact.terms(some).products
    assert exact.terms(many).products == pytest.approx(eight.terms(many).products / 0.6, rel=1e-3)


def test_tensor_parallelism_scales_less_than_linearly(cost_of):
    one, eight = (cost_of("model=llama3_70b", "cost=h200", f"engine.tp={tp}") for tp in (1, 8))
    assert one.decode_seconds(1, 128) / 8 < eight.decode_seconds(1, 128) < one.decode_seconds(1, 128) / 5
    latency = 160 * 8e-6
    share = eight.decode_seconds(1, 128) - one.step_weight_bytes(1) / 8 / 4.4e12
    assert share > latency


def test_a_window_bounds_what_is_read(cost_of):
    cost = cost_of("model=mistral_7b", "cost=h200")
    assert cost.decode_seconds(8, 32_000) == cost.decode_seconds(8, 4096)
    assert cost.decode_seconds(8, 4096) > cost.decode_seconds(8, 2048)


def test_a_token_reads_its_experts_and_a_batch_reads_all(cost_of):
    cost = cost_of("model=mixtral_8x7b", "cost=h200")
    assert cost.step_weight_bytes(1) == pytest.approx(2 * 12.75e9, rel=0.01)
    assert cost.step_weight_bytes(256) == pytest.approx(cost.step_weight_bytes(), rel=1e-6)
    assert cost.step_weight_bytes(1) < cost.step_weight_bytes(4) < cost.step_weight_bytes(16)


def test_a_plan_costs_what_its_rows_cost(cost_of):
    cost = cost_of("model=llama3_8b", "cost=h200")
    sample, decode = int(RowFlag.SAMPLE), int(RowFlag.SAMPLE | RowFlag.DECODE)
    plan = StepPlan(
        0,
        [Row(0, 0, 0, 1, 500, 0, decode), Row(1, 1, 0, 4, 900, 3, decode), Row(2, 2, 0, 300, 300, 0, sample)]
        + [Row(3, 3, 0, 256, 512, 0, 0)],
    )
    rows = [RowWork(1, 500), RowWork(4, 900, 4), RowWork(300, 300), RowWork(256, 512, 0)]
    assert cost.seconds(plan) == cost.step_seconds(rows)
    assert cost.step_seconds([RowWork(1, 500, times=7)]) == pytest.approx(cost.step_seconds([RowWork(1, 500)] * 7))
    assert cost.seconds(StepPlan(0, [])) == 0.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_predicts(cost_of, variant):
    cost = cost_of("model=llama3_8b", f"cost={variant}", device="cuda")
    assert 1e-4 < cost.decode_seconds(8, 1024) < cost.prefill_seconds(2048) < 60


def test_faster_hardware_is_faster(cost_of):
    seconds = [cost_of("model=llama3_8b", f"cost={v}").decode_seconds(8, 1024) for v in VARIANTS]
    assert seconds == sorted(seconds)


def test_an_option_of_a_variant_can_be_set(cost_of):
    slow = cost_of("model=llama3_8b", "cost=h200", "cost.bandwidth=2.2", "cost.tflops.bfloat16=350")
    fast = cost_of("model=llama3_8b", "cost=h200")
    assert slow.decode_seconds(1, 128) > 1.7 * fast.decode_seconds(1, 128)


def test_hardware_must_be_named(cost_of):
    with pytest.raises(ConfigError, match=r"cost\.bandwidth is required"):
        cost_of("model=llama3_8b", "cost=roofline")


def test_none_predicts_nothing(cost_of):
    assert cost_of("model=tiny", "cost=none") is None


def test_an_app_that_reads_no_cost_has_none():
    suite = SchedulerContract()
    suite.make = lambda limits, kv: PolicyScheduler(None, limits, kv)
    engine = suite.engine()
    assert bind_cost(engine.composition, engine.info.spec) is None


def test_on_a_cpu_auto_is_float32(cost_of):
    cost = cost_of("model=tiny", "cost=cpu", device="cpu")
    assert (cost.formats.dtype, cost.formats.weight_bits, cost.formats.kv_bytes) == ("float32", 32, 4)


def test_a_format_without_a_rate_is_refused(cost_of):
    with pytest.raises(ConfigError, match=r"no rate for matmuls in fp8; it has .*int8"):
        cost_of("model=llama3_8b", "cost=a100", "quant=fp8_here")


def test_fp8_weights_are_multiplied_in_the_models_dtype_where_the_gpu_has_no_fp8(cost_of):
    ampere, hopper = (Host(device="cuda", device_count=1, compute_capability=cc) for cc in ((8, 0), (9, 0)))
    for overrides, here, product in (
        (("cost=a100",), ampere, "bfloat16"),
        (("cost=h200",), hopper, "fp8"),
        (("cost=h200",), None, "fp8"),
        (("cost=a100", "quant.activations=plain"), None, "bfloat16"),
    ):
        formats = cost_of("model=llama3_8b", "quant=fp8", *overrides, here=here).formats
        assert (formats.weight_bits, formats.product) == (8, product)


def test_a_quantizer_that_states_nothing_is_refused(cost_of):
    with pytest.raises(PluginError, match="quant=silent does not state weight_bits and product"):
        cost_of("model=llama3_8b", "cost=h200", "quant=silent")


def test_a_model_that_does_not_know_its_size_is_refused():
    spec = ModelSpec("Odd", 100, 2, 64, 4, 2, 16, 96, 512, "bfloat16")
    cost = Roofline(RooflineConfig(bandwidth=1, tflops={"bfloat16": 100}))
    with pytest.raises(ConfigError, match="Odd does not state its number of parameters"):
        cost.bind(spec, EngineConfig(), Formats("bfloat16", 2, 16, "bfloat16", 2))


def test_predicting_imports_no_torch():
    modules = "dovetail.core.engine.cost, dovetail.plugins.cost.roofline, dovetail.plugins.scheduler.deadline, sys"
    code = f"import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_kv_dtype_is_refused(cost_of):
    assert cost_of("model=llama3_8b", "cost=h200", "engine.kv_dtype=fp8_e4m3").kv_bytes(1) == 65_536
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype=fp9 is not one of auto, .*fp8_e5m2"):
        cost_of("model=llama3_8b", "cost=h200", "engine.kv_dtype=fp9")


def test_lanes_share_experts_and_the_slowest_decides(cost_of):
    """With the rows of one lane of eight, experts get an eighth of them; attention and dense layers take as long."""
    cost = cost_of("model=deepseek_v3", "cost=h200", "quant=fp8_here", "engine.dp=8", "engine.ep=8", "experts=gather")
    prompt, decode = [RowWork(2048, 2048)], [RowWork(1, 1000, times=16)]
    assert cost.lanes_seconds([prompt] * 8) == pytest.approx(cost.step_seconds(prompt))
    one, none = cost.lanes_terms([prompt, *[[]] * 7])[:2]
    all_ = cost.terms(prompt)
    p = cost.spec.parameters
    share = 1 - (p.active_experts / (p.attention + p.mlp + p.active_experts)) * 7 / 8
    assert one.products == pytest.approx(share * all_.products, rel=0.05) and one.prefill == all_.prefill
    assert none.seconds == 0.0
    few, many = cost.lanes_terms([decode, *[[]] * 7])[0], cost.terms(decode)
    assert few.weights < 0.8 * many.weights and few.decode == many.decode
    mixed = cost.lanes_seconds([prompt, *[decode] * 7])
    assert cost.lanes_seconds([prompt, *[[]] * 7]) < mixed < cost.step_seconds(prompt)


@pytest.mark.parametrize(("drafter", "window"), [("draft_model", 5), ("layer_skip", None)])
def test_the_first_pass_of_a_proposal_feeds_the_drafters_window(drafter, window):
    composition = compose(["app=generate", "model=tiny", "cost=h200", f"spec_decode={drafter}"])
    model = composition.part("model")
    cost = bind_cost(composition, model.target().spec(model.config))
    assert cost.draft_window == window
    rows = 2048
    later = cost.drafter.decode_seconds(rows, 1000)
    first = cost.drafter.step_seconds([RowWork(window or 1, 1000, 1, rows)])
    assert cost.draft_seconds(rows, 3, 1000) == pytest.approx(first + 2 * later)
    assert (first > 1.01 * later) is (window is not None)
