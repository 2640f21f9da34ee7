"""app=generate loses no results: prompts are read as they are written, and a run continues where another ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dovetail.core.compose import cli
from dovetail.core.errors import ConfigError
from dovetail.plugins.app.generate import results
from dovetail.plugins.app.generate.app import GenerateApp
from dovetail.plugins.app.generate.prompts import gather
from dovetail.plugins.app.generate.results import ResultFile

SMALL = ("engine.device=cpu", "engine.max_len=64", "engine.kv_pages=16", "engine.max_seqs=2", "generate.max_tokens=2")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def records(file: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").split("\n")[:-1]]


def made(prompt: str) -> dict[str, object]:
    return {"prompt": prompt, "completions": []}


def test_a_file_of_prompts_is_split_at_line_feeds_only() -> None:
    Path("p.jsonl").write_bytes('\n{"prompt": "a\u2028b\u0085c"}\r\n\n{"prompt": "d"}'.encode("utf-8-sig"))
    assert gather([], "p.jsonl") == ["a\u2028b\u0085c", "d"]
    Path("p.txt").write_bytes("a\fb\u2028c\rd\r\n\n e ".encode())
    assert gather([], "p.txt") == ["a\fb\u2028c\rd", " e "]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": ""}', "p.jsonl:3: a prompt is empty"),
        ("p.jsonl", '\n\n{"text": "a"}', r'p.jsonl:3: not an object with "prompt" \(KeyError'),
        ("p.jsonl", '{"prompt": "a\\ud800"}', r"p.jsonl:1: a prompt is not valid Unicode: character 1 is '\\ud800'"),
        ("p.txt", "\n \n", "p.txt: the file has no prompt"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_named_by_its_line(name: str, text: str, message: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        gather([], name)


def test_a_prompt_of_the_command_line_that_is_not_utf_8_is_named() -> None:
    with pytest.raises(ConfigError, match="prompt 2 after `--`: a prompt is not valid Unicode"):
        gather(["a", "\udcff"], None)


def test_a_sampling_parameter_out_of_range_is_named_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "generate.n=200", "generate.seed=-1", "--", "x"]) == 2
    assert capsys.readouterr().err == (
        "dovetail: generate.n=200: should be less than or equal to 128; "
        "generate.seed=-1: should be greater than or equal to 0\n"
    )
    assert cli.main([*SMALL, "generate.stop=['']", "--", "x"]) == 2
    assert capsys.readouterr().err.startswith("dovetail: generate.stop: an empty stop string")


def test_results_are_on_disk_as_they_come_and_the_former_output_stays_until_the_end() -> None:
    former = json.dumps(made("old")) + "\n"
    Path("out.jsonl").write_text(former)
    with ResultFile("out.jsonl", ["a", "b"], {}) as file:
        file.write(1, made("b"))
        assert records("out.jsonl.partial")[1:] == [{"index": 1, **made("b")}]
        file.write(0, {"prompt": "a", "error": "too long"})
        assert Path("out.jsonl").read_text() == former
        file.finish()
    assert records("out.jsonl") == [{"index": 0, "prompt": "a", "error": "too long"}, {"index": 1, **made("b")}]
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]


def test_a_run_continues_after_the_last_whole_record() -> None:
    prompts = ["a", "b\u2028", "c"]
    with ResultFile("out.jsonl", prompts, {"seed": 1}) as file:
        file.write(1, made("b\u2028"))
    with Path("out.jsonl.partial").open("a") as cut:
        cut.write('{"index": 0, "pro')
    with pytest.raises(ConfigError, match=r"has 1 results of a run that did not end: generate.resume=true continues"):
        ResultFile("out.jsonl", prompts, {"seed": 1})
    with pytest.raises(ConfigError, match=r"was made with seed=1 \(now 2\)"):
        ResultFile("out.jsonl", prompts, {"seed": 2}, resume=True)
    with pytest.raises(ConfigError, match="its record 1 is not of these prompts"):
        ResultFile("out.jsonl", ["a", "x"], {"seed": 1}, resume=True)
    with ResultFile("out.jsonl", prompts, {"seed": 1}, resume=True) as file:
        assert file.done == {1}
        file.write(2, made("c"))
        file.write(0, made("a"))
        file.finish()
    assert [record["prompt"] for record in records("out.jsonl")] == prompts
    with ResultFile("out.jsonl", prompts, {}) as file:
        file.write(0, made("a"))
    with ResultFile("out.jsonl", prompts, {}, resume=False) as file:
        assert not file.done
    assert [path.name for path in Path().iterdir()] == ["out.jsonl"]


def test_a_full_disk_leaves_the_results_and_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with ResultFile("out.jsonl", ["a", "b"], {}) as file:
        file.write(0, made("a"))
        with monkeypatch.context() as full:
            full.setattr(file, "_file", Path("/dev/full").open("wb"))
            with pytest.raises(ConfigError, match=r"generate.output=out.jsonl: cannot be written \(.*No space left"):
                file.write(1, made("b"))
            with pytest.raises(OSError):
                file._file.close()
    with ResultFile("out.jsonl", ["a", "b"], {}, resume=True) as file:
        assert file.done == {0}


@pytest.mark.parametrize(
    ("there", "text", "message"),
    [
        ("out", "my notes\n", "exists and is not an output of app=generate"),
        ("out", '{"prompt": "a"}\n', "exists and is not an output of app=generate"),
        ("out.partial", "my notes\n", "exists and is not an unfinished output of app=generate"),
        ("out/file", "", "is not a regular file"),
    ],
)
def test_other_files_are_not_overwritten(there: str, text: str, message: str) -> None:
    Path(there).parent.mkdir(exist_ok=True)
    Path(there).write_text(text)
    with pytest.raises(ConfigError, match=message):
        ResultFile("out", ["a"], {})
    assert Path(there).read_text() == text


def test_the_prompts_are_not_overwritten_even_through_a_link() -> None:
    Path("p.jsonl").write_text("")
    Path("link").symlink_to("p.jsonl")
    with pytest.raises(ConfigError, match=r"generate.output=link is the file of the prompts"):
        ResultFile("link", ["a"], {}, source="p.jsonl")


def test_a_bad_prompt_is_one_line_and_an_interrupted_run_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in ("a", "x " * 200, "b")))
    words = [*SMALL, "generate.prompts=p.jsonl", "generate.output=out.jsonl"]

    def write_two(self: ResultFile, index: int, record: dict[str, object], write=ResultFile.write) -> None:
        if len(self.done) == 2:
            raise KeyboardInterrupt
        write(self, index, record)

    with monkeypatch.context() as interrupted:
        interrupted.setattr(results.ResultFile, "write", write_two)
        assert cli.main(words) == 130
    assert "2 of 3 results are in" in capsys.readouterr().err and not Path("out.jsonl").exists()
    assert cli.main([*words, "generate.resume=true"]) in (0, 1)
    assert cli.main(words) == 1
    assert "1 of 3 prompts failed" in capsys.readouterr().err
    good, bad, last = records("out.jsonl")
    assert good["completions"] and last["completions"] and [good["index"], last["index"]] == [0, 2]
    assert bad.keys() == {"index", "prompt", "error"} and "64" in str(bad["error"])


def test_an_output_of_errors_only_does_not_replace_a_former_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out.jsonl").write_text(json.dumps(made("old")) + "\n")
    assert cli.main([*SMALL, "generate.output=out.jsonl", "--", "x " * 200, "y " * 200]) == 2
    assert "64" in capsys.readouterr().err.splitlines()[-1]
    assert records("out.jsonl") == [made("old")] and not Path("out.jsonl.partial").exists()


@pytest.mark.parametrize("model", ["llama3_8b", "path"])
def test_a_model_without_tokenizer_is_refused_before_it_is_loaded(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has no weights either: reading them would fail with another message."""
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = ["model=llama3_8b"] if model == "llama3_8b" else ["model=llama", f"model.path={tmp_path}", "quant=none"]
    assert cli.main([*argv, "engine.device=cpu", "--", "x"]) == 2
    cause = "it has no checkpoint; set model.path" if model == "llama3_8b" else "tokenizer.json' is missing; add"
    assert "app=generate completes texts, and the model has no tokenizer: " in (text := capsys.readouterr().err)
    assert cause in text


def test_an_adapter_without_adapters_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GenerateApp, "_start", lambda *given: pytest.fail("the engine starts"))
    assert cli.main([*SMALL, "generate.adapter=x", "--", "x"]) == 2
    assert "this engine has none (adapter=none)" in capsys.readouterr().err
