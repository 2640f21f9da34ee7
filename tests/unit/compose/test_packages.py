"""Third-party packages: found by entry point and loaded independently; a broken one fails only when it is selected."""

import json
from importlib.metadata import PackageNotFoundError

import pytest

from dovetail.core.compose import Problem, Registered, Registry, cli, compose, discover, discovery
from dovetail.core.errors import ConfigError, PluginError

FOLDER = """
@hookimpl
def dovetail_config_dirs():
    return ["pkg://acme_plans.conf"]
"""
PRESET = "# @package _global_\n# Everything.\ndefaults:\n"


def merged(registry: Registry, found: Registry) -> Registry:
    """The stand-ins plus the discovered third-party components."""
    return Registry(
        [*registry.registered.values(), *(r for r in found.registered.values() if not r.package.is_builtin)],
        [p for p in found.problems if not p.package.startswith("dovetail ")],
        [*registry.config_dirs, *(d for d in found.config_dirs if not d[0].is_builtin)],
    )


def reasons(registry: Registry, package: str) -> list[str]:
    return [p.reason for p in registry.problems if p.package.startswith(package)]


def test_a_package_adds_a_component_and_presets(install, plugin, composed, registry):
    source = plugin() + "\n@hookimpl\ndef dovetail_config_dirs():\n    return ['pkg://acme_swift.conf']\n"
    folder = install("acme_swift", source) / "conf" / "preset"
    folder.mkdir(parents=True)
    (folder / "swift.yaml").write_text("# @package _global_\ndefaults:\n  - override /scheduler: swift\n")
    part = composed("+preset=swift", "scheduler.size=5", registry=merged(registry, discover())).part("scheduler")
    assert (part.name, part.config.size, str(part.package)) == ("swift", 5, "acme_swift 1.0")


@pytest.mark.parametrize("folder", ["acme_lost.conf", "no_such_package.conf"])
def test_a_config_folder_that_does_not_exist_is_listed(install, plugin, composed, registry, folder):
    install("acme_lost", plugin() + f"\n@hookimpl\ndef dovetail_config_dirs():\n    return ['pkg://{folder}']\n")
    problems = composed("scheduler=swift", registry=merged(registry, discover())).registry.problems
    assert [p.reason for p in problems] == [f"its config folder pkg://{folder} does not exist"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "ZeroDivisionError"),
        (
            "from dovetail import hookimpl\n@hookimpl\ndef dovetail_component():\n    return []",
            "entry point main: there is no hook `dovetail_component`. Did you mean `dovetail_components`?",
        ),
        ("def dovetail_components():\n    return []", "nothing in acme_bad is marked with @hookimpl"),
        (
            "from dovetail import hookimpl\n@hookimpl\ndef dovetail_components(x):\n    return []",
            "PluginValidationError",
        ),
        ("from dovetail import hookimpl\n@hookimpl\ndef dovetail_components():\n    return 1 / 0", "ZeroDivisionError"),
        ("from dovetail import hookimpl\n@hookimpl\ndef dovetail_components():\n    return [3]", "not a Component"),
        (
            "from dovetail import hookimpl\n@hookimpl\ndef dovetail_components():\n    pass",
            "dovetail_components() returned nothing, not a list",
        ),
        (
            "from dovetail import hookimpl\n@hookimpl\ndef dovetail_config_dirs():\n    return 'pkg://conf'",
            "dovetail_config_dirs() returned a str, not a list",
        ),
    ],
)
def test_a_broken_package_is_listed_and_stops_nobody(install, plugin, composed, registry, source, reason):
    install("acme_bad", source)
    install("acme_good", plugin())
    both = merged(registry, discover())
    assert [reason in r for r in reasons(both, "acme_bad")] == [True]
    assert composed("scheduler=swift", registry=both).part("scheduler").name == "swift"
    with pytest.raises(ConfigError, match=r"no such scheduler.*Packages that could not be used: acme_bad 1.0 \("):
        composed("scheduler=wanted", registry=both)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ('api="scheduler/0.3"', 'api="scheduler/9.0"'),
            "made for scheduler/9.0, and this Dovetail implements scheduler/0.3",
        ),
        (('api="scheduler/0.3"', 'api="scheduler/0.9"'), "made for scheduler/0.9"),
        (('api="scheduler/0.3"', 'api="0.1"'), "not of the form scheduler/<major>.<minor>"),
        (("size: int", "name: int"), "has a field `name`"),
        (('target="json:JSONDecoder"', 'target="json.JSONDecoder"'), "not of the form package.module:name"),
        (("config=C", "config=C, capabilities=print"), "its capabilities is <built-in function print>, not text"),
        (("config=C", "config=C, facts='json.loads'"), "its facts 'json.loads' is not of the form"),
        (("class C(Config)", "class C"), "not a subclass of dovetail.Config"),
        (("size: int = 3", "model_config = {'extra': 'ignore'}"), "must stay frozen, with extra='forbid'"),
        (("config=C", "config=C, renamed={'old': 'siz'}"), "renames `old` to `siz`"),
        (("size: int = 3", "size: object = object()"), "has a default that is not a plain value"),
    ],
)
def test_a_component_that_cannot_work_fails_only_when_chosen(install, plugin, composed, registry, change, reason):
    source = plugin()
    assert change[0] in source
    install("acme_old", source.replace(*change))
    both = merged(registry, discover())
    assert composed(registry=both).part("scheduler").name == "fcfs"
    with pytest.raises(PluginError, match="^package acme_old 1.0: scheduler=swift cannot be used") as caught:
        composed("scheduler=swift", registry=both)
    assert reason in str(caught.value)


def test_a_kind_that_does_not_exist_is_listed(install, plugin):
    install("acme_kind", plugin().replace('kind="scheduler"', 'kind="schedular"'))
    assert "Did you mean `scheduler`?" in reasons(discover(), "acme_kind")[0]


def test_two_packages_with_one_name_fail_when_it_is_chosen_and_one_can_be_blocked(install, plugin, composed, registry):
    install("acme_a", plugin())
    install("acme_b", plugin())
    both = merged(registry, discover())
    assert composed("scheduler=static", registry=both)
    with pytest.raises(PluginError, match=r"comes from acme_a 1.0 and acme_b 1.0; DOVETAIL_PLUGINS=-acme_a leaves one"):
        composed("scheduler=swift", registry=both)
    one = merged(registry, discover("-acme_a"))
    assert str(composed("scheduler=swift", registry=one).part("scheduler").package) == "acme_b 1.0"
    assert reasons(one, "acme_a") == ["blocked by DOVETAIL_PLUGINS=-acme_a"]


def test_a_blocked_package_is_not_imported(install):
    package = install("acme_loud", "raise SystemExit('imported')")
    assert package.exists() and reasons(discover("-acme-loud"), "acme_loud") == [
        "blocked by DOVETAIL_PLUGINS=-acme_loud"
    ]


def test_the_switch_is_checked():
    nothing = "no installed plugin package is called `nobody`"
    for switch, words in (("acme", "is not `-package`"), ("-dovetail", "cannot be blocked"), ("-nobody", nothing)):
        with pytest.raises(ConfigError, match=words):
            discover(switch)


@pytest.mark.parametrize("words", [["app=plugins"], ["--help"], ["--version"]])
def test_a_source_tree_without_metadata_says_how_to_install_it(words, monkeypatch, capsys):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(discovery, "entry_points", lambda group: [])
    monkeypatch.setattr(cli, "version", missing)
    discovery.installed.cache_clear()
    try:
        assert cli.main(words) == 2
    finally:
        discovery.installed.cache_clear()
    assert "the metadata of the package `dovetail`" in (err := capsys.readouterr().err) and "pip install -e /" in err


def test_a_name_that_the_environment_blocks(install, plugin, monkeypatch):
    from dovetail.core.compose import installed

    install("acme_env", plugin())
    monkeypatch.setenv("DOVETAIL_PLUGINS", "-acme_env")
    installed.cache_clear()
    try:
        assert ("scheduler", "swift") not in installed().registered
    finally:
        installed.cache_clear()


def test_what_cannot_be_used_is_not_offered(install, plugin, composed, registry, conf, monkeypatch, capsys):
    """Packages without a known name are named where nothing else is close; a clash concerns one component."""
    install("acme_old", plugin(name="statik", api="scheduler/9.0"))
    install("acme_twin", plugin(name="fcfs"))
    install("acme_bad", "1 / 0")
    both = merged(registry, discover())
    folder = conf("preset/tiny_cpus.yaml", "engine: {}\n")
    messages = []
    for word in ("scheduler=stat", "+preset=tiny_cpux", "quant=no", "scheduler=xyz"):
        with pytest.raises(ConfigError) as refused:
            composed(word, registry=both, config_dirs=[folder])
        messages.append(str(refused.value))
    assert messages[0] == "scheduler=stat: no such scheduler. Did you mean `static`? Options: fcfs, static."
    assert messages[1] == "preset=tiny_cpux: no such preset. Did you mean `tiny_cpu`? Options: tiny_cpu."
    assert "Did you mean `none`?" in messages[2]
    assert "acme_bad 1.0 (" in messages[3] and "acme_old" not in messages[3] and "acme_twin" not in messages[3]
    monkeypatch.setattr(cli, "installed", lambda: both)
    assert cli.main(["--help", "--config-dir", folder]) == 0
    shown = capsys.readouterr().out
    assert "fcfs, static\n" in shown and "tiny_cpus" not in shown
    assert compose(["plugins.package=acme_twin"], app="plugins", registry=discover()).run() == 0
    assert "scheduler=fcfs" in capsys.readouterr().out.partition("cannot be used")[2].replace(
        "scheduler=fcfs is built", ""
    )


def test_an_option_of_another_component_is_explained(composed):
    with pytest.raises(ConfigError, match=r"has no option `hosts`. It is an option of kv_cache=radix"):
        composed("kv_cache.hosts=1")


def test_the_fingerprint_changes_with_versions_and_not_with_the_order(stand_ins, registry):
    items = list(registry.registered.values())
    newer = [Registered(r.component, type(r.package)(r.package.name, "2.0")) for r in items]
    assert Registry(reversed(items)).fingerprint() == registry.fingerprint()
    assert len({registry.fingerprint(), Registry(newer).fingerprint(), Registry(items[1:]).fingerprint()}) == 3


class TestTargets:
    def test_a_target_is_imported_when_it_is_built(self, install, plugin, composed, registry):
        package = install("acme_run", plugin(target="acme_run.policy:Swift"))
        composition = composed("scheduler=swift", registry=merged(registry, discover()))
        with pytest.raises(PluginError, match="package acme_run 1.0: .*acme_run.policy:Swift, which does not load"):
            composition.build("scheduler")
        (package / "policy.py").write_text(
            "from dovetail.core.interfaces import Scheduler\n"
            "class Swift(Scheduler):\n"
            "    def __init__(self, config, *, extra):\n        self.got = (config.size, extra)\n"
            "Swift.__abstractmethods__ = frozenset()\n"
        )
        import importlib

        importlib.invalidate_caches()
        assert composition.build("scheduler", extra=1).got == (3, 1)

    def test_a_target_of_another_kind_is_refused(self, install, plugin, composed, registry):
        install("acme_odd", plugin())
        composition = composed("scheduler=swift", registry=merged(registry, discover()))
        with pytest.raises(
            PluginError, match="json:JSONDecoder is not a subclass of dovetail.core.interfaces.Scheduler"
        ):
            composition.target("scheduler")


def test_the_plugins_app_runs_whatever_is_broken(install, plugin, capsys):
    install("acme_bad", "1 / 0")
    install("acme_twin", plugin(name="fcfs"))
    assert compose(["plugins.format=json"], app="plugins", registry=discover()).run() == 0
    shown = capsys.readouterr().out
    assert "ZeroDivisionError" in shown and "scheduler=fcfs is built in" in shown


def listed(registry: Registry, capsys, *words: str) -> dict:
    words = ("format=json", *words)
    assert compose([f"plugins.{word}" for word in words], app="plugins", registry=registry).run() == 0
    return json.loads(capsys.readouterr().out)


def test_the_plugins_app_lists_variants_and_presets_with_their_package(install, plugin, capsys):
    conf = install("acme_plans", plugin() + FOLDER) / "conf"
    for path, text in {
        "scheduler/swift_big.yaml": "# Room for\n# more.\ndefaults: [swift, _self_]\nsize: 9\n",
        "preset/acme.yaml": PRESET + "  - override /logits: [penalties]\n  - override /scheduler: swift_big\n",
        "preset/bad.yaml": "defaults: []\n",
    }.items():
        (conf / path).parent.mkdir(parents=True, exist_ok=True)
        (conf / path).write_text(text)
    found = listed(discover(), capsys)
    mine = {"package": "acme_plans 1.0"}
    swift_big = {"kind": "scheduler", "name": "swift_big", "base": "swift", "about": "Room for more."} | mine
    assert swift_big in found["variants"]
    acme = {"name": "acme", "chooses": ["logits=[penalties]", "scheduler=swift_big"], "about": "Everything."} | mine
    assert [p for p in found["presets"] if p["package"] == mine["package"]] == [acme]
    assert ("preset", "bad") in {(p["kind"], p["name"]) for p in found["problems"]}
    of_package, presets = (listed(discover(), capsys, word) for word in ("package=acme_plans", "kind=preset"))
    assert (of_package["variants"], of_package["presets"]) == ([swift_big], [acme])
    assert [c["name"] for c in of_package["components"]] == ["swift"]
    assert {p["package"] for p in of_package["problems"]} == {"acme_plans 1.0"}
    assert acme in presets["presets"] and presets["components"] == presets["variants"] == []
    with pytest.raises(ConfigError, match="acme_plan: no such package provides anything. Did you mean `acme_plans`?"):
        listed(discover(), capsys, "package=acme_plan")


def test_what_a_package_prints_while_it_loads_is_no_part_of_the_listing(install, plugin, capsys):
    install("acme_chatty", "print('hello from acme')" + plugin(target="acme_chatty.more:Swift"))
    registry = discover()
    assert "swift" in {c["name"] for c in listed(registry, capsys)["components"]}
    assert capsys.readouterr().out == ""


def test_every_option_of_what_dovetail_brings_is_described(capsys):
    own = [c for c in listed(discover(), capsys)["components"] if c["package"] == "dovetail"]
    assert [f"{c['kind']}={c['name']}" for c in own if not c["about"]] == []
    assert [f"{c['name']}.{o['name']}" for c in own for o in c["options"] if not o["doc"]] == []


def test_what_dovetail_brings_has_no_problem():
    own = compose(app="plugins", registry=discover()).registry
    assert [p for p in own.problems if p.package.startswith("dovetail")] == []


def test_a_problem_of_a_whole_package_has_no_kind():
    assert Problem("acme", "because").kind == ""
