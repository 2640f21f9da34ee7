"""Variants of an app that compares compositions: built from `vary`, a list or a ladder, with the baselines of each."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from dovetail.core.compose import KINDS, Composition, compose
from dovetail.core.compose.wording import show
from dovetail.core.errors import ConfigError, PluginError
from dovetail.plugins.app.ablate.config import AblateConfig, Design, Value

Words = tuple[str, ...]
AS_GIVEN = "as given"
"""Name of the baseline where variants have names of their own."""
Unfit = Callable[[str, Composition, str], str | None]
"""(name, composition, block) -> reason why this host cannot run it, or None."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The app whose variants are built."""

    name: str
    """First part of its options."""
    composes: str
    """App for which the variants are composed."""
    fixed: Mapping[str, str]
    """First parts of keys that cannot vary -> reason."""


ABLATE = Owner(
    name="ablate",
    composes="bench",
    fixed={
        "app": "each variant is measured as app=bench does",
        "ablate": "the options of this app hold for all variants",
        "bench": "set the option of that name of app=ablate, for all variants",
        "workload": "variants are compared on the same requests; choose them once, by workload=<name>",
    },
)


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    changes: Words
    """Overrides added to the given composition, or for a ladder step to the previous step."""
    composition: Composition
    """Composition for the owner's `composes`."""
    baselines: tuple[str, ...] = ()
    """Names of the variants to compare with, nearest first."""
    skipped: str | None = None
    """Reason why this host cannot run it."""
    block: str = ""
    """Values of `across` that it shares with its baseline; "" = there are none."""

    def within(self, block: str) -> Variant:
        """Return the variant with the name that it has as one of a block."""
        baselines = tuple(in_block(block, name) for name in self.baselines)
        return replace(self, name=in_block(block, self.name), baselines=baselines, block=block)


@dataclass(slots=True)
class _Mistakes:
    owner: Owner
    found: list[str] = field(default_factory=list)

    def compose(self, name: str, words: Sequence[str], like: Composition) -> Composition | None:
        try:
            return _compose(self.owner, words, like)
        except (ConfigError, PluginError) as error:
            self.found.append(f"{name}: {error}")
            return None

    def raise_all(self) -> None:
        if self.found:
            raise one_error(self.found)


def one_error(mistakes: Sequence[str]) -> ConfigError:
    lines = [text.replace("\n", "\n    ") for text in dict.fromkeys(mistakes)]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} mistakes in the variants:\n" + "\n".join(f"  - {text}" for text in lines))


def in_block(block: str, name: str) -> str:
    """Return the name of a variant of a block."""
    return f"{block}: {name}" if block else name


def make(config: AblateConfig, composition: Composition, unfit: Unfit = lambda name, one, block: None) -> list[Variant]:
    """Return every variant, each block starting with its baseline. Raises one ConfigError with all mistakes."""
    if not (config.vary or config.arms or config.ladder):
        raise ConfigError(
            "app=ablate needs something to try: 'ablate.vary={kv_cache:[paged,radix]}' compares values, "
            "`app=ladder` climbs the built-in ladder"
        )
    if not config.across:
        return _variants(config, composition, unfit, "")
    found: list[Variant] = []
    for block, given in _blocks(config.across, composition):
        try:
            made = _variants(config, given, unfit, block)
        except (ConfigError, PluginError) as error:
            raise ConfigError(f"{block}: {error}") from error
        found += [variant.within(block) for variant in made]
    return found


def _variants(config: AblateConfig, composition: Composition, unfit: Unfit, block: str) -> list[Variant]:
    """Return the variants of one block."""
    if config.ladder:
        return _steps(config.ladder, composition, unfit, block)
    if config.vary:
        found = combinations(ABLATE, config.vary, composition, design=config.design)
    else:
        found = _named(config.arms, composition)
    return [
        replace(variant, skipped=unfit(in_block(block, variant.name), variant.composition, block)) for variant in found
    ]


def _blocks(across: Mapping[str, Sequence[Value]], composition: Composition) -> Iterator[tuple[str, Composition]]:
    """Yield each combination of values, in words, and the composition with it."""
    owner = replace(ABLATE, fixed={key: why for key, why in ABLATE.fixed.items() if key != "workload"})
    mistakes = _Mistakes(owner)
    _check_values(owner, "across", across, composition, mistakes)
    mistakes.raise_all()
    for chosen in _chosen(across, "grid"):
        words = merged(composition.overrides, [word(key, value) for key, value in chosen.items()])
        name = ", ".join(f"{key}={show(value)}" for key, value in chosen.items())
        given = compose(words, registry=composition.registry, config_dirs=composition.config_dirs)
        yield name, given


def _check_values(
    owner: Owner, option: str, values_of: Mapping[str, Sequence[Value]], like: Composition, mistakes: _Mistakes
) -> None:
    """Check each value alone, so that its mistake is reported once and not for every combination."""
    given = _given(owner, like)
    for key, values in values_of.items():
        if reason := _cannot_vary(owner, option, key):
            mistakes.found.append(reason)
            continue
        if twice := [value for i, value in enumerate(values) if _is_in(value, values[:i])]:
            mistakes.found.append(f"{owner.name}.{option}: {key} has {show(twice[0])} twice")
        for value in values:
            mistakes.compose(f"{key}={show(value)}", merged(given, [word(key, value)]), like)


# Values.


def combinations(
    owner: Owner, vary: Mapping[str, Sequence[Value]], composition: Composition, *, design: Design = "grid"
) -> list[Variant]:
    """Return the baseline, which is the given composition, and each combination of values that differs from it."""
    mistakes, given = _Mistakes(owner), _given(owner, composition)
    _check_values(owner, "vary", vary, composition, mistakes)
    mistakes.raise_all()
    base = _compose(owner, given, composition)
    found: list[Variant] = []
    for chosen in _chosen(vary, design):
        words = [word(key, value) for key, value in chosen.items()]
        name = ", ".join(f"{key}={show(value)}" for key, value in chosen.items())
        made = mistakes.compose(name, merged(given, words), composition)
        if made is None or _same(made, base):
            continue
        if same := next((other for other in found if _same(other.composition, made)), None):
            mistakes.found.append(f"{name}: composes to the same as {same.name}")
        found.append(Variant(name, tuple(words), made))
    mistakes.raise_all()
    name = ", ".join(f"{key}={_value_of(key, base)}" for key in vary)
    if not found:
        raise ConfigError(
            f"{owner.name}.vary: every value equals the baseline's ({name}), so there is nothing to compare"
        )
    if any(variant.name == name for variant in found):
        name = f"as given, {name}"  # a variant chosen by a preset has the name of its component
    return [Variant(name, (), base), *(replace(variant, baselines=(name,)) for variant in found)]


def _chosen(vary: Mapping[str, Sequence[Value]], design: Design) -> Iterator[dict[str, Value]]:
    if design == "one_at_a_time":
        return ({key: value} for key, values in vary.items() for value in values)
    return (dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values()))


def _cannot_vary(owner: Owner, option: str, key: str) -> str:
    where = f"{owner.name}.{option}: `{key}`"
    if not re.fullmatch(r"[\w@./]+", key):
        return f"{where} is neither a kind nor a dotted option, such as kv_cache or engine.page_size"
    root = key.split(".")[0]
    return f"{where} cannot vary: {owner.fixed[root]}" if root in owner.fixed else ""


def _is_in(value: Value, values: Sequence[Value]) -> bool:
    return any(value == other and type(value) is type(other) for other in values)


def _value_of(key: str, base: Composition) -> str:
    """Return the value of a key in the composition; for a kind, the name by which it was chosen."""
    chosen = [text.partition("=")[2] for text in base.overrides if key_of(text) == key]
    if chosen:
        return chosen[-1]
    if key in KINDS and KINDS[key].cardinality == "one":
        return base.part(key).name
    node: Any = yaml.safe_load(base.to_yaml())
    for name in key.split("."):
        node = node.get(name, "as given") if isinstance(node, Mapping) else "as given"
    return show(node) if not isinstance(node, Mapping) else "as given"


# A list.


def listed(owner: Owner, lines: Sequence[str], composition: Composition) -> list[Variant]:
    """Return the baseline, which is the given composition, and a variant for each line of overrides."""
    return _beside(owner, [(line, tuple(shlex.split(line))) for line in lines], composition)


def _named(arms: Mapping[str, Words], composition: Composition) -> list[Variant]:
    return _beside(ABLATE, [*arms.items()], composition)


def _beside(owner: Owner, arms: Sequence[tuple[str, Words]], composition: Composition) -> list[Variant]:
    """`arms`: name and overrides of each variant."""
    mistakes, given = _Mistakes(owner), _given(owner, composition)
    base = Variant(AS_GIVEN, (), _compose(owner, given, composition))
    found = [base]
    for name, words in arms:
        if refused := _refused(owner, words):
            mistakes.found += [f"{name}: {reason}" for reason in refused]
        elif (made := mistakes.compose(name, merged(given, words), composition)) is not None:
            if same := next((other for other in found if _same(other.composition, made)), None):
                mistakes.found.append(f"{name}: composes to the same as {same.name}")
            found.append(Variant(name, words, made, (base.name,)))
    if AS_GIVEN in dict(arms):
        mistakes.found.append(f"`{AS_GIVEN}` is the name of the baseline: give the variant another name")
    mistakes.raise_all()
    return found


def _refused(owner: Owner, words: Sequence[str]) -> list[str]:
    return [f"`{text}`: {owner.fixed[root]}" for text in words if (root := _root(text)) in owner.fixed]


# A ladder.


def _steps(ladder: Mapping[str, Words], composition: Composition, unfit: Unfit, block: str) -> list[Variant]:
    """Build the ladder. A step that cannot run on this host is skipped; the next one builds on the last that can."""
    mistakes, words = _Mistakes(ABLATE), _given(ABLATE, composition)
    found: list[Variant] = []
    for name, step in ladder.items():
        if refused := _refused(ABLATE, step):
            mistakes.found += [f"{name}: {reason}" for reason in refused]
            continue
        mine = merged(words, step)
        made = mistakes.compose(name, mine, composition)
        if made is None:
            continue
        climbed = [variant for variant in found if variant.skipped is None]
        if climbed and _same(climbed[-1].composition, made):
            mistakes.found.append(f"{name}: composes to the same as the previous step, {climbed[-1].name}")
        before = tuple(dict.fromkeys(variant.name for variant in (climbed[-1:] + climbed[:1])))
        found.append(Variant(name, step, made, before, unfit(in_block(block, name), made, block)))
        if found[-1].skipped is None:
            words = list(mine)
    mistakes.raise_all()
    if len(found) == 1:
        raise ConfigError("ablate.ladder has only one step, so there is nothing to compare it with")
    return found


# Overrides.


def _compose(owner: Owner, words: Sequence[str], like: Composition) -> Composition:
    return compose(words, app=owner.composes, registry=like.registry, config_dirs=like.config_dirs)


def _given(owner: Owner, composition: Composition) -> list[str]:
    """Return the overrides of the command line, without those of the owner."""
    return [text for text in composition.overrides if _root(text) not in ("app", owner.name)]


def _root(text: str) -> str:
    return key_of(text).split(".")[0]


def key_of(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def merged(words: Sequence[str], more: Sequence[str]) -> list[str]:
    """Append the overrides `more`, which replace earlier ones of the same keys."""
    keys = {key_of(text) for text in more}
    return [*(text for text in words if key_of(text) not in keys), *more]


def word(key: str, value: Value) -> str:
    """Return an override; a string that would be parsed as something else is quoted."""
    if isinstance(value, str) and (
        not re.fullmatch(r"[A-Za-z_/][\w./:@-]*", value) or value.lower() in ("true", "false", "null", "nan", "inf")
    ):
        # A backslash is literal, except before a quote.
        escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + m[2].replace('"', '\\"'), value)
        return f'{key}="{escaped}"'
    return f"{'+' if key == 'preset' else ''}{key}={show(value)}"


def _same(one: Composition, other: Composition) -> bool:
    return one.to_yaml() == other.to_yaml()
