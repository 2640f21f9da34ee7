"""Files of sentence-transformers, and the errors in them: they are untrusted."""

from __future__ import annotations

import json

import pytest

from dovetail.core.checkpoint import FolderCheckpoint
from dovetail.core.embedding_files import read_embedding
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import EmbeddingSpec

MODULES = [
    {"path": "", "type": "sentence_transformers.models.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def write(folder, modules: object = MODULES, pooling: object = None) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_lasttoken": True}))


@pytest.mark.parametrize(
    ("modules", "pooling", "spec"),
    [
        (MODULES, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, EmbeddingSpec("last")),
        (MODULES[:2], {"pooling_mode_mean_tokens": True}, EmbeddingSpec("mean", normalize=False)),
        (MODULES, {"pooling_mode": "mean"}, EmbeddingSpec("mean")),
    ],
)
def test_what_they_say(modules, pooling, spec, tmp_path):
    assert read_embedding(FolderCheckpoint(tmp_path)) is None
    write(tmp_path, modules, pooling)
    assert read_embedding(FolderCheckpoint(tmp_path)) == spec


@pytest.mark.parametrize(
    ("modules", "pooling", "says"),
    [
        ({"a": 1}, None, "not a list"),
        ([*MODULES, {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}], None, "module type 'Dense'"),
        (MODULES[:1], None, "needs a Pooling"),
        ([{**MODULES[0], "path": "0_T"}, MODULES[1]], None, "the folder itself"),
        ([MODULES[0], {**MODULES[1], "path": "../1_Pooling"}], None, "is not a folder next to it"),
        (MODULES, {"pooling_mode_cls_token": True}, "pooling mode is 'pooling_mode_cls_token'"),
        (MODULES, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "lasttoken' and 'pooling_mode"),
        (MODULES, {"pooling_mode": "max"}, "the options are lasttoken, mean"),
        (MODULES, {"pooling_mode_lasttoken": "yes"}, "true or false"),
    ],
)
def test_what_is_refused(modules, pooling, says, tmp_path):
    write(tmp_path, modules, pooling)
    with pytest.raises(ConfigError, match=says):
        read_embedding(FolderCheckpoint(tmp_path))
