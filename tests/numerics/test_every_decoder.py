"""Every type of decoder in transformers, small and random: its greedy tokens are the library's, or it is refused in
words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.errors import ConfigError

from .decoders import DECODERS, SIZES, save_decoder

PROMPT = [5, 7, 11, 13, 17, 19, 23, 29]
LENGTH = 8
MOST = 60_000_000
"""Parameters; some types have sizes that SIZES does not set."""

OTHER_NAMES = ("gpt-sw3",)
"""Names of another type, GPT-2, which stands in the folders."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]


def test_each_type_gives_the_librarys_tokens_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of several models, such as one for images, and those that cannot be built or run in these sizes by the
    library are left out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    equal, unlike, refused = [], [], {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if CONFIG_MAPPING[kind].sub_configs or kind in OTHER_NAMES:
            continue
        monkeypatch.setitem(DECODERS, kind, DECODERS.get(kind, SIZES))
        folder = tmp_path / kind
        try:
            model = save_decoder(folder, kind)
            expected = continued(model)
        except Exception:  # The library's own code: each type has rules of its own for its sizes.
            continue
        if sum(weight.numel() for weight in model.parameters()) > MOST:
            continue
        if type(model).config_class.model_type != kind:
            name_itself(folder, kind)
        try:
            with LLM(str(folder), overrides=["model=auto", "engine.device=cpu", "engine.max_len=64"]) as llm:
                params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
                found = list(llm.generate([PROMPT], params)[0].token_ids)
        except ConfigError as error:
            refused[kind] = str(error)
            continue
        (equal if found == expected else unlike).append(kind)
    print(f"equal: {' '.join(equal)}\nrefused: {' '.join(refused)}")
    assert not unlike
    assert not {kind: why for kind, why in refused.items() if "model=transformers does not run" not in why}
    assert len(equal) > 50, "the sizes fit few types now"


def continued(model: Any) -> list[int]:
    """Return the tokens with which the library continues PROMPT."""
    ids = torch.tensor([PROMPT])
    whole = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0)
    return whole[0, len(PROMPT) :].tolist()


def name_itself(folder: Path, kind: str) -> None:
    """Let the config.json of a type that runs with another one's class name its own, as published ones do."""
    path = folder / "config.json"
    own = "".join(part.capitalize() for part in kind.replace("-", "_").split("_"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [f"{own}ForCausalLM"]}))
