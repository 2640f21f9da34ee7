"""Tests of each part's own behaviour; test_contracts.py has the rules common to all plugins."""

import csv
import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from dovetail_lighthouse.config import LighthouseConfig, NoRepeatNgramConfig, StepCsvConfig, ThreeBitsConfig
from dovetail_lighthouse.eviction import SegmentedLRU
from dovetail_lighthouse.no_repeat_ngram import NoRepeatNgram
from dovetail_lighthouse.scheduler import Lighthouse
from dovetail_lighthouse.step_csv import StepCsv
from dovetail_lighthouse.three_bits import GROUP, ThreeBits, round_weights, values_of

from dovetail import LLM, ConfigError, RequestError, SamplingParams
from dovetail.core.interfaces import LinearShape, LogitsContext, Request, SchedulerLimits, Sequence, StepRecord
from dovetail.core.testing.checkpoint import MemoryCheckpoint
from dovetail.core.testing.observer import records


def waiting(*arrivals):
    return [Sequence(i, Request(i, (1,), SamplingParams(), arrival=at)) for i, at in enumerate(arrivals)]


@pytest.mark.parametrize(
    ("max_age", "order", "victims"),
    [(100, [3, 2, 1, 0], [0, 1, 2, 3]), (0, [0, 1, 2, 3], [3, 2, 1, 0]), (10, [0, 1, 3, 2], [2, 3, 1, 0])],
)
def test_newest_first_but_late_ones_before_all_others(max_age, order, victims):
    scheduler = Lighthouse(LighthouseConfig(max_age=max_age), SchedulerLimits(16, 4, 64), kv=None)
    seqs, ctx = waiting(0.0, 1.0, 5.0, 6.0), SimpleNamespace(clock=12.0)
    assert [seq.uid for seq in scheduler.order(seqs, ctx)] == order
    left, out = list(seqs), []
    while left:
        left.remove(victim := scheduler.victim(left, ctx))
        out.append(victim.uid)
    assert out == victims


def test_a_page_that_was_reused_outlives_a_scan():
    policy = SegmentedLRU()
    for page in range(4):
        policy.on_publish(page, 0, 0)
        policy.on_release(page)
    policy.on_hit(1)
    policy.on_release(1)
    for page in range(10, 40):
        policy.on_publish(page, 0, 0)
        policy.on_release(page)
    assert [policy.victim() for _ in range(33)] == [0, 2, 3, *range(10, 40)]
    assert policy.victim() == 1
    policy.on_publish(1, 0, 0)
    policy.on_release(1)
    assert 1 in policy.probation, "a page with new contents starts in probation"


def asking(size):
    return Request(0, (1,), SamplingParams(extra={} if size is None else {"no_repeat_ngram": size}))


def banned(history, size, prompt_len):
    """Return the banned tokens by definition, from n-grams wholly after `prompt_len`."""
    grams = {tuple(history[i : i + size]) for i in range(prompt_len, len(history) - size + 1)} if size else set()
    last = tuple(history[len(history) - size + 1 :]) if size else ()
    return {gram[-1] for gram in grams if gram[:-1] == last}


@pytest.mark.parametrize("prompt", [True, False])
def test_against_the_definition(prompt):
    rng = random.Random(7)
    processor = NoRepeatNgram(NoRepeatNgramConfig(longest=5, prompt=prompt))
    slots, width, vocab = 40, 30, 4
    processor.allocate(slots, vocab, torch.device("cpu"))
    sizes, lengths = [rng.randrange(6) for _ in range(slots)], [rng.randrange(1, width) for _ in range(slots)]
    prompts = [rng.randrange(1, length + 1) for length in lengths]
    for slot, size in enumerate(sizes):
        processor.join(slot, asking(size))
    tokens = [[rng.randrange(vocab) for _ in range(width)] for _ in range(slots)]
    ctx = LogitsContext(
        torch.arange(slots), torch.tensor(lengths), torch.tensor(tokens).int(), torch.tensor(prompts), max(lengths)
    )
    out = processor.apply(torch.zeros(slots, vocab), ctx)
    found = [set(row.isinf().nonzero().flatten().tolist()) for row in out]
    expected = [banned(tokens[i][: lengths[i]], sizes[i], 0 if prompt else prompts[i]) for i in range(slots)]
    assert found == expected
    assert any(expected)


@pytest.mark.parametrize(("asked", "size"), [(None, 2), (0, 0), (8, 8)])
def test_a_request_sets_its_own_n(asked, size):
    processor, request = NoRepeatNgram(NoRepeatNgramConfig(size=2)), asking(asked)
    processor.allocate(1, 8, torch.device("cpu"))
    processor.join(0, request)
    assert (processor.wants(request), processor.size_S.item()) == (size > 0, size)


def test_an_n_that_is_too_long_is_refused():
    with pytest.raises(RequestError, match="no_repeat_ngram=9 is more than 8"):
        NoRepeatNgram(NoRepeatNgramConfig()).validate(asking(9), 100)


def test_the_file_has_one_line_per_step(tmp_path):
    path = tmp_path / "steps.csv"
    observer, seen = StepCsv(StepCsvConfig(path=str(path))), list(records(5))
    for record in seen:
        observer.step(record)
    with path.open() as file:
        assert len(list(csv.DictReader(file))) == 5, "each line is written when its step is done"
    observer.close()
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == [field.name for field in dataclasses.fields(StepRecord)]
    assert [float(line["clock"]) for line in lines] == [record.clock for record in seen]


def test_all_parts_in_one_engine(tmp_path):
    path = tmp_path / "steps.csv"
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    overrides = ["+preset=lighthouse", f"observer.step_csv.path={path}", "engine.device=cpu"]
    with LLM("tiny", overrides=overrides) as llm:
        (free,) = llm.generate("x = 1, 1, 1, 1,", params)
        with pytest.raises(RequestError, match="no_repeat_ngram"):
            llm.generate("x", params.model_copy(update={"extra": {"no_repeat_ngram": -1}}))
        (bound,) = llm.generate("x = 1, 1, 1, 1,", params.model_copy(update={"extra": {"no_repeat_ngram": 2}}))
        (again,) = llm.generate("x = 1, 1, 1, 1,", params)
    free, bound, again = (list(result.completions[0].token_ids) for result in (free, bound, again))
    assert free == again != bound
    assert len(set(zip(bound, bound[1:], strict=False))) == len(bound) - 1
    assert sum(int(line["sampled"]) for line in csv.DictReader(path.open())) == 96


def test_a_checkpoint_of_three_bits_has_the_values_of_its_codes():
    quantizer = ThreeBits(ThreeBitsConfig())
    quantizer.read_checkpoint(MemoryCheckpoint({"quantization_config": {"quant_method": "lighthouse"}}))
    shape = LinearShape(64, 8, (8,), dtype=torch.float32)
    method = quantizer.linear("layers.0.mlp.down", shape)
    params = method.create(shape, torch.device("cpu"))
    codes, scale_OG = round_weights(torch.randn(8, 64), GROUP)
    method.load(params, slice(0, 8), {"weight_codes": codes, "weight_scale": scale_OG})
    expected = values_of(codes) * scale_OG.repeat_interleave(GROUP, 1)
    assert torch.equal(method.rows(params, torch.arange(8)), expected)
    with pytest.raises(ConfigError, match="codes of more than 3 bits"):
        method.load(params, slice(0, 8), {"weight_codes": codes + 8, "weight_scale": scale_OG})
