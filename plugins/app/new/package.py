"""The files of a new package. The templates are the files of a working package whose component is called `mine`."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from dovetail.core.compose import KINDS
from dovetail.core.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
COMMON = TEMPLATES / "package"

RUN = {
    "app": "dovetail app=mine",
    "attention": "dovetail attention=mine engine.device=cpu",
    "collective": "dovetail collective=mine executor=multiproc engine.tp=2 engine.device=cpu",
    "cost": "dovetail cost=mine scheduler=deadline",
    "experts": "dovetail app=bench model=small_moe experts=mine executor=multiproc engine.tp=2 engine.device=cpu",
    "logits": "dovetail +logits=mine generate.temperature=0.9",
    "model": "dovetail app=bench model=mine workload=fixed",
    "observer": "dovetail +observer=mine observer.mine.every=1",
    "reasoning_parser": "dovetail app=plugins plugins.kind=reasoning_parser",
    "router": "dovetail router=mine engine.dp=2",
    "tool_parser": "dovetail app=plugins plugins.kind=tool_parser",
    "workload": "dovetail app=bench workload=mine",
}
"""Kind -> command that runs the component; the others: `dovetail <kind>=mine`."""


def files(kind: str, name: str, package: str) -> dict[str, str]:
    """Return path -> text of a package with the component `kind=name`."""
    module = re.sub(r"\W", "_", package)
    class_name = "".join(word.capitalize() for word in name.split("_"))
    found = {path: _common(text, kind) for path, text in _texts(COMMON).items()}
    for path, text in _texts(TEMPLATES / kind).items():
        found[f"src/dovetail_mine/{path}" if path != "variant.yaml" else f"{_conf(kind)}/mine_variant.yaml"] = text
    modules = {Path(path).stem for path in found}
    found = {path: _without_absent(text, modules, kind) for path, text in found.items()}
    taken = class_name != "Mine" and re.search(rf"\b{class_name}\b", "\n".join(found.values()))
    if taken or keyword.iskeyword(class_name):
        raise ConfigError(f"new.component={kind}/{name}: its class would be called {class_name}, which is taken")
    words = {"dovetail_mine": module, "dovetail-mine": package, "mine": name, "mine_variant": f"{name}_variant"}

    def renamed(text: str) -> str:
        text = re.sub(r"(?<![\w-])(dovetail_mine|dovetail-mine|mine_variant|mine)(?!\w)", lambda m: words[m[1]], text)
        return re.sub(r"(?<![a-z])(Test)?Mine(?=[A-Z]|\b)", rf"\g<1>{class_name}", text)

    return {renamed(path): renamed(text) for path, text in sorted(found.items())}


def _conf(kind: str) -> str:
    return f"src/dovetail_mine/conf/{kind}"


def _texts(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _common(text: str, kind: str) -> str:
    for word, value in (
        ("KIND/API", KINDS[kind].api),
        ("KIND", kind),
        ("RUN", RUN.get(kind, f"dovetail {kind}=mine")),
    ):
        text = text.replace(word, value)
    return text


def _without_absent(text: str, modules: set[str], kind: str) -> str:
    """Drop the lines and the hook that refer to a file which this kind does not have."""
    for module in ("capabilities", "contract"):
        if module not in modules:
            text = re.sub(rf'^ +{module}="dovetail_mine\.{module}:\w+",\n', "", text, flags=re.M)
    if "mine_variant" not in modules:
        text = re.sub(r"\n\n\n@hookimpl\ndef dovetail_config_dirs.*", "\n", text, flags=re.S)
        text = "".join(line for line in text.splitlines(keepends=True) if "mine_variant" not in line)
    return text
