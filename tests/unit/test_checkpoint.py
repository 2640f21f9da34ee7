"""Model folders: what is read, and what is refused with which words."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from dovetail.core.checkpoint import FolderCheckpoint, locate, open_checkpoint
from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError
from dovetail.core.layers import load_weights
from dovetail.core.startup_notes import collect_notes


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    return tmp_path


def write_sharded(folder, weight_map):
    save_file({"a": torch.arange(6.0).view(2, 3)}, folder / "one.safetensors")
    save_file({"b": torch.ones(4)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_slices_of_a_sharded_checkpoint(folder):
    write_sharded(folder, {"b": "two.safetensors", "a": "one.safetensors"})
    opened = dict(FolderCheckpoint(folder).open())
    assert set(opened) == {"a", "b"}
    assert opened["a"]().get_shape() == [2, 3]
    assert opened["a"]()[:, 1:].tolist() == [[1.0, 2.0], [4.0, 5.0]]


def test_a_single_file(folder):
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    assert [name for name, _ in FolderCheckpoint(folder).open()] == ["a"]


def test_a_single_file_comes_before_a_stale_index(folder):
    """As in transformers."""
    write_sharded(folder, {"a": "one.safetensors", "b": "gone.safetensors"})
    save_file({"a": torch.full((2,), 7.0)}, folder / "model.safetensors")
    with collect_notes() as notes:
        ((name, opener),) = FolderCheckpoint(folder).open()
    assert (name, opener()[:].tolist()) == ("a", [7.0, 7.0])
    assert list(notes) == [
        "weights are read from model.safetensors; model.safetensors.index.json next to it is not used"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "../one.safetensors",
        "/etc/one.safetensors",
        "x/../../one.safetensors",
        "..\\one.safetensors",
        "C:\\one.safetensors",
    ],
)
def test_an_index_may_not_leave_the_folder(folder, name):
    write_sharded(folder, {"a": name})
    with pytest.raises(ConfigError, match="outside the model folder"):
        list(FolderCheckpoint(folder).open())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "one.safetensors"])
def test_a_pipe_or_a_device_is_not_read(folder, name):
    """Reading a pipe waits forever, and reading /dev/zero takes all memory."""
    write_sharded(folder, {"a": "one.safetensors"})
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"{name}: is a pipe, socket or device"):
            checkpoint = open_checkpoint(folder)
            checkpoint.text(name) if name.endswith(".json") else checkpoint.tensors()
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")


def test_an_index_that_promises_too_much(folder):
    write_sharded(folder, {"a": "one.safetensors", "c": "two.safetensors"})
    with pytest.raises(ConfigError, match="first 'c'"):
        list(FolderCheckpoint(folder).open())
    write_sharded(folder, {"a": "three.safetensors"})
    with pytest.raises(ConfigError, match="three.safetensors is missing"):
        list(FolderCheckpoint(folder).open())


EVIL = "\x1b[2J" + "x" * 100_000


def unknown_tensor(folder):
    save_file({EVIL: torch.ones(1)}, folder / "model.safetensors")
    load_weights([], FolderCheckpoint(folder).open())


def absent_tensor(folder):
    write_sharded(folder, {EVIL: "one.safetensors"})
    list(FolderCheckpoint(folder).open())


def absent_file(folder, name=EVIL):
    write_sharded(folder, {"a": f"{name}.safetensors"})
    list(FolderCheckpoint(folder).open())


def file_outside(folder):
    write_sharded(folder, {EVIL: f"../{EVIL}"})
    list(FolderCheckpoint(folder).open())


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (unknown_tensor, r"1 unexpected \('\\x1b\[2Jxx"),
        (absent_tensor, r"not in it, first '\\x1b\[2Jxx"),
        (absent_file, r"cannot be opened \(File name too long\)"),
        (lambda folder: absent_file(folder, "\x1b[2J"), r"json: \\x1b\[2J.safetensors is missing"),
        (file_outside, r"tensor '\\x1b\[2Jxx.* is in '../\\x1b"),
        (lambda folder: locate(EVIL), r"cannot be opened \(File name too long\)"),
        (lambda folder: locate("a\0"), r"a\\x00: cannot be opened \(embedded null byte\)"),
        (lambda folder: locate("~no-such-user/model"), "cannot be opened"),
        (lambda folder: ConfigJson({"k": EVIL}, "config.json").count("k"), r"k is '\\x1b"),
    ],
)
def test_names_from_files_are_escaped_and_shortened(fail, words, folder):
    with pytest.raises(ConfigError, match=words) as error:
        fail(folder)
    assert str(error.value).isprintable() and len(str(error.value)) < 1500


def test_a_truncated_file_is_named(folder):
    save_file({"a": torch.ones(100)}, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-50])
    with pytest.raises(ConfigError, match="model.safetensors: cannot be read"):
        list(FolderCheckpoint(folder).open())


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 4976698672\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "model.gguf"])
def test_a_pointer_of_git_lfs_is_named(folder, name):
    """A clone without LFS has pointers in place of large files."""
    (folder / name).write_text(POINTER)
    with pytest.raises(ConfigError, match=rf"{name}: is a Git LFS pointer, .* `git lfs pull`"):
        checkpoint = open_checkpoint(folder / name if name.endswith("gguf") else folder)
        checkpoint.config()
        checkpoint.text("tokenizer.json")
        checkpoint.tensors()


def test_pickles_are_refused(folder):
    torch.save({"a": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickled.*model.load=dummy"):
        list(FolderCheckpoint(folder).open())
    write_sharded(folder, {"a": "pytorch_model.bin"})
    with pytest.raises(ConfigError, match="only safetensors"):
        list(FolderCheckpoint(folder).open())


def test_a_missing_folder_is_said_without_asking_a_hub(monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(ConfigError, match=r"model\.path=/no/such.*model\.load=dummy"):
        locate("/no/such")


def test_generation_config_has_the_last_word_on_eos(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    assert open_checkpoint(folder).config() == {"eos_token_id": [2, 7], "bos_token_id": 1}


@pytest.mark.parametrize("wrong", ["2", -1, [2.5], 10**6])
def test_a_wrong_eos_of_generation_config_names_that_file(folder, wrong):
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ConfigError, match=r"/generation_config\.json: eos_token_id is"):
        open_checkpoint(folder).config()


def test_a_folder_inside_a_package():
    assert (locate("pkg://dovetail.core/interfaces") / "model.py").is_file()
    with pytest.raises(ConfigError, match="'no_such_package'"):
        locate("pkg://no_such_package/tiny")
    with pytest.raises(ConfigError, match="without '..'"):
        locate("pkg://dovetail.core/../plugins")


def test_reading_a_config_loads_no_torch(folder):
    script = (
        "import sys; from dovetail.core.checkpoint import open_checkpoint; "
        "import dovetail.plugins.model.llama.families; "
        f"open_checkpoint({str(folder)!r}).config(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
