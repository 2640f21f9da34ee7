"""Ranks verify the same drafts, also if the drafters' logits differ between them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.core.compose import compose
from dovetail.core.interfaces import Draft, DraftContext, Drafter, ModelSource, ModelSpec, TargetView
from dovetail.core.testing.model_driver import build_context
from dovetail.core.testing.rank_threads import ThreadCollective, on_threads
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.drafts import Drafts
from dovetail.core.worker.sampler import SampleParams
from dovetail.core.worker.sampling import _draw_by_rejection, _verify

VOCAB, K, ROWS = 11, 3, 4
PARENTS = (-1, -1, 0)


class Disturbed(Drafter):
    """Draws from random logits, which `noise` changes."""

    def __init__(self, noise: torch.Tensor, *, tree: bool, verify: Any) -> None:
        super().__init__(None)
        self.noise, self.tree, self.verify = noise, tree, verify

    lookahead = K  # type: ignore[assignment]

    @property
    def depth(self) -> int:
        return K - self.tree

    def propose(self, ctx: DraftContext) -> Draft:
        generator = torch.Generator().manual_seed(7)
        logits = torch.randn(K, ROWS, VOCAB, generator=generator) + self.noise
        count_B = torch.full((ROWS,), K)
        if not self.tree:
            return Draft(torch.stack([ctx.draw(logits[w], w) for w in range(K)], 1), count_B)
        root_Bn, child_Bn = ctx.best(logits[0], 0, 2)[0], ctx.best(logits[1], 1, 1)[0]
        parents_BK, drawn_BK = (torch.tensor(each).expand(ROWS, -1) for each in (PARENTS, (0, 0, 1)))
        return Draft(torch.cat((root_Bn, child_Bn), 1), count_B, parents_BK, drawn_BK)


def state_of(depth: int, verify: str) -> DeviceState:
    """Return a state in which each row has a key of its own."""
    state = DeviceState(
        slots=ROWS,
        max_len=16,
        lookahead=K,
        groups=(),
        device=torch.device("cpu"),
        seed=0,
        draft_probs=VOCAB if verify == "rejection" else 0,
        draft_depth=depth,
    )
    state.key_S.copy_(torch.arange(ROWS + 1) + 20)
    return state


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("verify", ["draws", "rejection"])
def test_disturbed_logits_on_one_rank_do_not_split_the_ranks(tree: bool, verify: str) -> None:
    """Rank 1 has other logits in one row, and NaN in another one."""
    target_NV = torch.randn(ROWS * (K + 1), VOCAB, generator=torch.Generator().manual_seed(8))

    def step(collective: ThreadCollective) -> list[torch.Tensor]:
        noise = torch.zeros(ROWS, VOCAB)
        if collective.rank == 1:
            noise[0], noise[1] = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(9)), float("nan")
        drafter = Disturbed(noise, tree=tree, verify=verify)
        state = state_of(drafter.depth, verify)
        state.temperature_S.fill_(1.0)
        state.computed_S.fill_(4)
        drafts = Drafts(drafter, state, None, VOCAB, collective=collective)  # type: ignore[arg-type]
        slots_B = torch.arange(ROWS)
        drafts.propose(slots_B, torch.full((ROWS,), K), K, bound=8)
        found = [state.tokens_SL.clone(), state.drafts_S.clone()]
        if verify == "rejection":
            levels = torch.tensor([0, 1, 1, 2] if tree else range(K + 1))
            at: Any = SimpleNamespace(slots_R=slots_B, base_R=torch.full((ROWS,), 5), limit_R=torch.full((ROWS,), K))
            params = SampleParams.of(state, slots_B.repeat_interleave(K + 1), random=True, filtered=False)
            given = target_NV, at, 5 + levels.expand(ROWS, -1), params, state
            if tree:
                found.append(_draw_by_rejection(*given, collective))
            else:
                found.append(_verify(*given, "rejection", collective)[1].accepted_R)
        return [*found, state.computed_S]

    first, second = on_threads(2, step)
    assert int(first[1][:ROWS].min()) == K
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


class OfParts(Drafter):
    """Draws from the logits of a head whose ranks have a part of the vocabulary each, and counts what it computes."""

    lookahead = K  # type: ignore[assignment]

    def __init__(self, head: Any) -> None:
        super().__init__(None)
        self.head = head

    def propose(self, ctx: DraftContext) -> Draft:
        states_BC = torch.randn(K, ROWS, 6, generator=torch.Generator().manual_seed(7))
        drafts = [ctx.draw_from(self.head, self.head.logits, states_BC[w], w) for w in range(K)]
        return Draft(torch.stack(drafts, 1), torch.full((ROWS,), K))


class SplitHead:
    """Each rank has a range of a table's columns, the last one possibly fewer."""

    def __init__(self, collective: ThreadCollective) -> None:
        self.build = SimpleNamespace(collective=collective, spec=SimpleNamespace(vocab=VOCAB))
        self.table_CV = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5))
        self.calls: list[str] = []

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor:
        self.calls.append("whole")
        return states_BC @ self.table_CV

    def local_logits(self, states_BC: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.calls.append("part")
        each = -(-VOCAB // self.build.collective.size)
        first = self.build.collective.rank * each
        return (states_BC @ self.table_CV)[:, first : first + each], first


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.7)])
@pytest.mark.parametrize("verify", ["draws", "rejection"])
def test_ranks_draw_from_their_parts_of_the_vocabulary(temperature: float, top_p: float, verify: str) -> None:
    """The drafts are those of one rank. Filters and rejection need all logits."""

    def step(collective: ThreadCollective) -> tuple[torch.Tensor, list[str]]:
        state = state_of(K, verify)
        state.temperature_S.fill_(temperature)
        state.top_p_S.fill_(top_p)
        state.computed_S.fill_(4)
        head = SplitHead(collective)
        drafts = Drafts(OfParts(head), state, None, VOCAB, collective=collective)  # type: ignore[arg-type]
        facts = {"random": temperature > 0, "filtered": top_p < 1}
        drafts.propose(torch.arange(ROWS), torch.full((ROWS,), K), K, bound=8, **facts)
        return state.tokens_SL[:ROWS, 5 : 5 + K].clone(), head.calls

    ((alone, _),) = on_threads(1, step)
    assert len(alone.unique()) > 3
    whole = top_p < 1 or (verify == "rejection" and temperature > 0)
    for tokens, calls in on_threads(3, step):
        assert torch.equal(tokens, alone) and calls == ["whole" if whole else "part"] * K


def test_a_drafter_may_be_whole_on_every_rank() -> None:
    """Its layers have all channels and call no collective; a third number of ranks is refused."""

    def build(collective: ThreadCollective) -> list[tuple[int, int]]:
        spec = ModelSpec("small", VOCAB, 2, 8, 2, 2, 4, 8, 16, "float32")
        build = build_context(spec, collective=collective)
        view = TargetView(build, ModelSource(None, dummy=True), ROWS, 16, 1, embed=lambda x: x, logits=lambda x: x)
        with pytest.raises(ValueError, match="tp=3: a drafter is cut over 1 or all 2 ranks"):
            view.build_context(spec, view.build.quantizer, 3)
        builds = [view.build_context(spec, view.build.quantizer, tp) for tp in (None, 1)]
        return [(each.collective.rank, each.collective.size) for each in builds]

    assert on_threads(2, build) == [[(0, 2), (0, 1)], [(1, 2), (0, 1)]]


@pytest.mark.parametrize("words", [["spec_decode=eagle3"], ["spec_decode=draft_model", "spec_decode.model.load=dummy"]])
def test_a_whole_drafter_has_the_pages_of_all_heads(words: list[str]) -> None:
    composition = compose(["model=tiny", *words])
    spec = composition.part("model").target().spec(composition.part("model").config)

    def page_bytes(collective: ThreadCollective) -> list[int]:
        view = TargetView(
            build_context(spec, collective=collective),
            ModelSource(None, dummy=True),
            ROWS,
            16,
            1,
            embed=lambda x: x,
            logits=lambda x: x,
        )
        found = []
        for more in ([], ["spec_decode.tp=1"]):
            drafter = compose(["model=tiny", *words, *more]).build("spec_decode")
            drafter.bind(view)
            found.append(drafter.kv_groups()[0].bytes_per_page)
        return found

    cut, whole = on_threads(2, page_bytes)[1]
    assert whole == 2 * cut
