"""Composing must not affect the user's Hydra app, import torch or claim the top-level names `core` and `plugins`. Front
ends must not import torch either, and starts not its compiler."""

import copy
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from dovetail.core.compose import compose, hookspecs, installed


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def globals_of_hydra():
    store, resolvers = copy.deepcopy(ConfigStore.instance().repo), set(BaseContainer._resolvers)
    return store, GlobalHydra.instance().hydra, VersionBase.instance().getbase(), resolvers


@pytest.mark.parametrize("version", ["1.1", "1.2", "1.3"])
@pytest.mark.filterwarnings("ignore")
def test_composing_inside_a_hydra_app_changes_nothing_of_it(composed, tmp_path, version):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "main.yaml").write_text("defaults:\n  - model: mine\n  - _self_\nlr: 1\n")
    ConfigStore.instance().store(group="model", name="mine", node={"depth": 3})
    with hydra.initialize_config_dir(str(tmp_path / "theirs"), version_base=version):
        before = globals_of_hydra()
        assert composed("scheduler=static", "+preset=tiny_cpu").part("model").name == "tiny"
        assert globals_of_hydra() == before
        assert OmegaConf.to_container(hydra.compose("main", ["lr=2"])) == {"model": {"depth": 3}, "lr": 2}


@pytest.mark.filterwarnings("ignore")
def test_the_version_that_a_hydra_app_asks_for_does_not_change_ours(composed, conf):
    folder = conf("preset/old.yml", "scheduler:\n  max_chunk: 1\n")  # Hydra 1.1 would read this file.
    with hydra.initialize(version_base="1.1", config_path=None):
        assert composed(config_dirs=[folder]).registry.problems == ()


def test_a_mistake_leaves_hydra_s_version_as_it_was(composed):
    before = VersionBase.instance().getbase()
    with pytest.raises(ValueError):
        composed("scheduler=nope")
    assert VersionBase.instance().getbase() is before


def test_importing_dovetail_imports_nothing_heavy_and_no_top_level_core():
    heavy = ("torch", "hydra", "pydantic", "core", "plugins", "conf")
    assert python(f"import dovetail, sys; print([m for m in {heavy} if m in sys.modules])") == "[]\n"


def test_composing_imports_no_torch_and_no_top_level_core():
    code = (
        "from dovetail import compose; import sys; compose(); compose(app='plugins');"
        "print([m for m in ('torch', 'transformers', 'triton', 'core', 'plugins', 'conf') if m in sys.modules])"
    )
    assert python(code) == "[]\n"


def test_front_ends_import_no_torch_and_a_start_imports_no_torch_dynamo():
    """Each costs every process or start more than a second."""
    code = """if True:
        import sys
        import dovetail.plugins.app.serve.front_end_process, dovetail.plugins.app.serve.app
        print("torch" in sys.modules)
        from dovetail import LLM
        with LLM("tiny", overrides=["engine.device=cpu", "engine.kv_pages=16", "engine.max_len=64"]):
            print("torch._dynamo" in sys.modules, "triton" in sys.modules)
    """
    assert python(code) == "False\nFalse False\n"


def test_every_public_name_is_there():
    code = "import dovetail as d; print([n for n in d.__all__ if not hasattr(d, n)], dir(d) == sorted(d.__all__))"
    assert python(code) == "[] True\n"


def test_a_clone_without_links_says_so_in_one_line(tmp_path):
    import dovetail

    package = tmp_path / "dovetail"
    package.mkdir()
    (package / "__init__.py").write_text(Path(dovetail.__file__).read_text())
    (package / "core").write_text("../../core")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dovetail"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "is a text file and not a symbolic link" in last and "core.symlinks" in last


def test_the_real_defaults_compose_and_presets_are_sound():
    own = [p for p in compose(app="plugins").registry.problems if p.package.startswith("dovetail")]
    assert own == []
    assert compose(app="generate").engine.tp == 1


def test_every_hook_is_documented():
    hooks = [f for name, f in vars(hookspecs).items() if name.startswith("dovetail_")]
    assert len(hooks) == 4 and all(f.__doc__ for f in hooks)


def test_the_registry_is_loaded_once():
    assert installed() is installed()
