"""The command line: a mistake gives one message and exit code 2; prompts arrive exactly as typed."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import dovetail
from dovetail.core.compose import AppConfig, Registry, Selected, cli, compose, composer
from dovetail.core.compose.registry import Package
from dovetail.core.errors import ConfigError, PluginError
from dovetail.core.interfaces.app import App

ROOT = Path(__file__).parents[3]


@pytest.fixture
def seen(monkeypatch, stand_ins, make):
    """List of (composition, prompts) for each run of the stand-in app."""
    runs = []

    class Generate(App):
        def run(self, composition, prompts):
            runs.append((composition, list(prompts)))
            return 3

    module = ModuleType("app_here")
    module.Generate = Generate
    monkeypatch.setitem(sys.modules, "app_here", module)
    base = stand_ins()
    generate = base.registered["app", "generate"]
    app = make("app", "generate", generate.component.config, target="app_here:Generate")
    others = [r for key, r in base.registered.items() if key != ("app", "generate")]
    registry = Registry([*others, type(generate)(app, generate.package)], config_dirs=base.config_dirs)
    for module in (composer, cli):
        monkeypatch.setattr(module, "installed", lambda: registry)
    return runs


def test_an_app_runs_and_its_exit_code_is_the_program_s(seen):
    assert cli.main(["scheduler=static"]) == 3
    assert seen[0][0].part("scheduler").name == "static"


@pytest.mark.parametrize(
    "prompt",
    ["def fib(n, m):", "a=b", 'say "yes", please', "it's {x: 1}", "--cfg", "-m", "~x", "${engine.tp}", "--", ""],
)
def test_a_prompt_is_not_an_override(seen, prompt):
    assert cli.main(["engine.seed=1", "--", prompt, "second, one"]) == 3
    composition, prompts = seen[0]
    assert prompts == [prompt, "second, one"] and composition.engine.seed == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sheduler=fcfs"], "Did you mean `scheduler`?"),
        (["scheduler=nope"], "Options: fcfs, static."),
        (["model=/models/mine"], "A folder is given as model=auto model.path=/models/mine"),
        (["scheduler.max_chunk=x"], "scheduler.max_chunk=x: should be a whole number."),
        (["Once upon a time"], "A prompt goes after `--`"),
        (["generate.max_tokens=[1"], "cannot be read"),
        (["+preset=a", "+preset=b"], "`+preset=b`: a preset is given already; several are written +preset=[a,b]"),
        (["+engine.tp=1"], "`engine.tp` has a value already: write engine.tp=... without `+`"),
        (["scheduler=null"], "`scheduler=null`: null chooses nothing. Options: fcfs, static."),
        (["+preset=null"], "`+preset=null`: null chooses nothing."),
        (["scheduler@engine=fcfs"], "with these choices nothing at `engine` takes a scheduler"),
        (["engine.seed=" + "[" * 500 + "]" * 500], "[...` cannot be read (it is nested too deeply)"),
        (["logits=[null]"], "`logits=[null]`: null chooses nothing. The empty list is logits=[]. Options: "),
        (["=3"], "`=3` has no key before `=`"),
        (["engine.tp.x=1"], "engine.tp: should be a whole number"),
        (["-m", "scheduler=fcfs,static"], "runs each alternative in a separate process"),
        (["--multirun"], "runs each alternative in a separate process"),
        (["app=list", "--", "hello"], "app=list takes no prompts"),
        (["--nope"], "--nope"),
        (["--cfg", "hydra"], "invalid choice"),
        (["--config-dir", "/nowhere"], "no such folder"),
        (["scheduler=${oc.env:NO_SUCH_VARIABLE}"], "scheduler"),
        (["engine.seed=${oc.env:NO_SUCH_VARIABLE}"], "NO_SUCH_VARIABLE"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(seen, capsys, monkeypatch, argv, words):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("dovetail: ") and words in err
    assert "Traceback" not in err and "HYDRA" not in err and len(err.splitlines()) == 1
    assert seen == []


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("plan.lengths={a:1}", "should be a list, as in [value]."),
        ("plan.options=[1]", "should be an object"),
    ],
)
def test_a_list_is_no_object(word, wanted):
    with pytest.raises(ConfigError, match=re.escape(f"{word}: {wanted}")):
        compose([word], app="plan")


def test_a_broken_target_is_a_message_too(seen, capsys):
    assert cli.main(["app=serve"]) == 2
    assert "package home 1.0: app=serve needs nowhere:Nothing" in capsys.readouterr().err


@pytest.fixture
def app_that_raises(stand_ins, make, monkeypatch):
    """app_that_raises(error): return a registry with app=sweep, whose constructor raises `error`."""

    def build(error):
        class Sweep(App):
            def __init__(self, config):
                raise error

            def run(self, composition, prompts): ...

        module = ModuleType("app_there")
        module.Sweep = Sweep
        monkeypatch.setitem(sys.modules, "app_there", module)
        return stand_ins(make("app", "sweep", AppConfig, target="app_there:Sweep"))

    return build


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_constructor_that_raises_is_a_message_that_names_the_package(app_that_raises, monkeypatch, capsys, debug):
    registry = app_that_raises(KeyError("no such table"))
    monkeypatch.setenv("DOVETAIL_DEBUG", debug)
    monkeypatch.setattr(composer, "installed", lambda: registry)
    assert cli.main(["app=sweep"]) == 2
    err = capsys.readouterr().err
    assert "dovetail: package home 1.0: app=sweep could not be built: KeyError: 'no such table'" in err
    assert ("Traceback" in err, "DOVETAIL_DEBUG=1 shows" in err) == (bool(debug), not debug)


def test_a_constructor_that_is_called_otherwise_than_it_expects_says_how(app_that_raises):
    part = app_that_raises(ConfigError("is not reached")).registered["app", "sweep"]
    with pytest.raises(PluginError, match=r"called as Sweep\(config, \.\.\., kv=\.\.\.\), which does not fit: too"):
        Selected(part, part.component.config()).build(1, kv=2)


def test_an_error_of_ours_leaves_a_constructor_as_it_is(app_that_raises):
    registry = app_that_raises(ConfigError("words=: give some"))
    with pytest.raises(ConfigError, match="^words=: give some$"):
        compose(["app=sweep"], registry=registry).run()


def test_a_reader_that_is_gone_ends_the_run_quietly(tmp_path):
    """Pipe into `| head`, for an app that writes much and one that writes little."""
    for words in (["app=plugins", "plugins.format=json"], ["app=plugins", "plugins.kind=router"], ["--help"]):
        run = subprocess.Popen([sys.executable, str(ROOT / "run.py"), *words], stdout=subprocess.PIPE, stderr=-1)
        run.stdout.close()
        assert (run.stderr.read(), run.wait()) == (b"", 141)
        run.stderr.close()


def test_a_broken_pipe_elsewhere_is_not_hidden(seen, monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr(composer, "validate", broken)
    with pytest.raises(BrokenPipeError):
        cli.main([])


def test_a_bug_of_ours_keeps_its_traceback(seen, monkeypatch):
    monkeypatch.setattr(composer, "validate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_so_does_one_in_a_class_of_ours_that_a_package_registers(seen, monkeypatch):
    registry = composer.installed()
    reader = (Package("acme", "2.1"), "dovetail.core.checkpoint:FolderCheckpoint")
    found = Registry(registry.registered.values(), config_dirs=registry.config_dirs, checkpoint_readers=[reader])
    for each in (composer, cli):
        monkeypatch.setattr(each, "installed", lambda: found)
    monkeypatch.setattr(composer, "validate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


@pytest.mark.parametrize("debug", ["", "1"])
def test_an_error_in_the_code_of_a_package_names_it(seen, monkeypatch, capsys, debug):
    """Not only in components: here in a checkpoint reader, which calls a library."""
    module = ModuleType("acme_reader.files")
    exec("import json\ndef read(*_):\n    return json.loads('no JSON')", vars(module))
    registry = composer.installed()
    reader = (Package("acme", "2.1"), "acme_reader.files:Reader")
    found = Registry(registry.registered.values(), config_dirs=registry.config_dirs, checkpoint_readers=[reader])
    for each in (composer, cli):
        monkeypatch.setattr(each, "installed", lambda: found)
    monkeypatch.setattr(composer, "validate", module.read)
    monkeypatch.setenv("DOVETAIL_DEBUG", debug)
    assert cli.main([]) == 2
    err = capsys.readouterr().err
    assert "dovetail: package acme 2.1: JSONDecodeError: Expecting value" in err
    assert ("Traceback" in err, "DOVETAIL_DEBUG=1 shows" in err) == (bool(debug), not debug)


def test_cfg_prints_the_composed_config_and_runs_nothing(seen, capsys):
    assert cli.main(["--cfg", "job", "engine.tp=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("app: generate\ngenerate:\n  max_tokens: 16\nengine:\n  tp: 2\n") and seen == []


def test_flags_may_stand_anywhere(seen, capsys):
    assert cli.main(["engine.tp=2", "--cfg", "job", "engine.pp=3"]) == 0
    assert "tp: 2\n  pp: 3\n" in capsys.readouterr().out


def test_help_is_short_and_lists_the_options_of_each_kind(seen, capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "  scheduler         fcfs, static\n" in shown and "app=plugins" in shown
    assert len(shown.splitlines()) < 40


def test_messages_name_the_program_that_was_typed(seen, capsys, monkeypatch):
    for path, name in {"/usr/bin/dovetail": "dovetail", "/x/dovetail/__main__.py": "python -m dovetail"}.items():
        monkeypatch.setattr(sys, "argv", [path])
        assert cli.main(["Once upon"]) == 2 and f"{name} -- 'Once upon'" in capsys.readouterr().err
        assert cli.main(["--help"]) == 0 and capsys.readouterr().out.startswith(f"usage: {name} [")


def test_the_package_is_a_program_and_says_its_version(tmp_path):
    said = subprocess.run([sys.executable, "-m", "dovetail", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout == f"dovetail {dovetail.__version__}\n"


def test_a_deprecation_is_one_line(seen, capsys):
    assert cli.main(["scheduler.chunk=4"]) == 3
    assert capsys.readouterr().err == "dovetail: package home 1.0: scheduler.chunk is now scheduler.max_chunk\n"


def run(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *argv],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def test_the_real_program_makes_no_folders_and_loads_no_torch(tmp_path):
    listed = run("app=plugins", "plugins.format=json", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert listed.returncode == 0 and '"fingerprint"' in listed.stdout
    assert " torch\n" not in listed.stderr and " pydantic\n" in listed.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_real_program_reports_a_mistake_in_one_line(tmp_path):
    done = run("app=plugins", "plugins.kin=x", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "dovetail: plugins.kin: app=plugins has no option `kin`. Did you mean `kind`? Options: kind, package, format."
    ]


def test_sigterm_ends_a_run_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []

    def run(argv: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # as `timeout` does
            saved.append("results")
        return 0

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main([]) == 143
    assert saved == ["results"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
