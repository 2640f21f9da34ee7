"""The result of composing: every part selected and validated, nothing built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dovetail.core.compose.capabilities import Host
from dovetail.core.compose.compatibility import conflicts, layout_conflicts
from dovetail.core.compose.config import AppConfig
from dovetail.core.compose.engine_config import EngineConfig
from dovetail.core.compose.registry import Registry
from dovetail.core.compose.selected import Selected
from dovetail.core.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class Lane:
    """A replica's place among those that share its routed experts (data-parallel attention, DeepSeek-V3, 2024)."""

    number: int
    count: int
    address: str
    """host:port at which the ranks of all lanes connect."""
    lockstep: object = None
    """The core.parallel.lockstep.Lockstep of lanes in one process; None = each lane has a process."""


@dataclass(frozen=True, slots=True)
class Composition:
    registry: Registry
    overrides: tuple[str, ...]
    """The overrides given. Composing them again with the same registry and config_dirs gives an equal composition."""
    app_part: Selected
    parts: Mapping[str, Selected | dict[str, Selected]]
    """Kind -> its part. For list kinds: kind -> name -> part, in the selected order."""
    engine_config: EngineConfig | None
    """None if the app does not read it."""
    config_dirs: tuple[str, ...] = ()
    """Absolute paths of the user's folders with presets and variants. Workers and replicas compose the same again."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """Kind -> the name that selected its part, on the command line or in a preset: a component or a variant."""
    lane: Lane | None = None
    """None = this replica shares its experts with no other one."""

    @property
    def app(self) -> str:
        return self.app_part.name

    @property
    def engine(self) -> EngineConfig:
        if self.engine_config is None:
            raise ValueError(f"app={self.app} does not declare that it needs `engine`")
        return self.engine_config

    @property
    def takes_prompts(self) -> bool:
        return isinstance(self.app_part.config, AppConfig) and self.app_part.config.takes_prompts

    @property
    def lanes(self) -> int:
        """Number of replicas that share routed experts; 1 = each replica has all experts."""
        return self.engine.lanes if self.lane is None else self.lane.count

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which routed experts can be placed: those of all lanes."""
        return self.engine.tp * self.lanes

    def part(self, kind: str) -> Selected:
        """Return the part of a kind that allows one part."""
        part = self._declared(kind)
        if not isinstance(part, Selected):
            raise ValueError(f"there may be several parts of kind `{kind}`; use many({kind!r})")
        return part

    def many(self, kind: str) -> dict[str, Selected]:
        """Return the parts of a kind that allows several."""
        parts = self._declared(kind)
        if isinstance(parts, Selected):
            raise ValueError(f"there is one part of kind `{kind}`; use part({kind!r})")
        return parts

    def _declared(self, kind: str) -> Selected | dict[str, Selected]:
        if kind not in self.parts:
            raise ValueError(f"app={self.app} does not declare that it needs `{kind}`")
        return self.parts[kind]

    def target(self, kind: str) -> type[Any]:
        return self.part(kind).target()

    def build(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Import the class of a kind's part and return `Class(config, *args, **kwargs)`."""
        return self.part(kind).build(*args, **kwargs)

    def check(self, host: Host, model_facts: Mapping[str, object] | None = None) -> None:
        """Raise one CapabilityError with every conflict. `model_facts` come from the checkpoint's config."""
        if found := conflicts(self, host, model_facts or {}):
            raise CapabilityError(found)

    def check_layout(self, host: Host) -> None:
        """Like `check`, but only for requirements that apply on any host: for an app that builds nothing."""
        if found := layout_conflicts(self, host):
            raise CapabilityError(found)

    def selected(self) -> Iterator[Selected]:
        """Yield all selected components, those in options of others included."""
        yield from selected_in((self.app_part, self.parts))

    def run(self, prompts: Sequence[str] = ()) -> int:
        return int(self.app_part.build().run(self, prompts))

    def to_yaml(self) -> str:
        """Return the composed config as readable YAML: only the nodes that the app reads."""
        return str(yaml.safe_dump(self.nodes(), sort_keys=False, allow_unicode=True))

    def nodes(self) -> dict[str, Any]:
        """Return the composed config as plain values: only the nodes that the app reads."""
        nodes: dict[str, Any] = {"app": self.app}
        options = self.app_part.to_node()
        del options["name"]
        nodes[self.app] = options
        if self.engine_config is not None:
            nodes["engine"] = self.engine_config.model_dump(mode="json")
        for kind, part in self.parts.items():
            nodes[kind] = part.to_node() if isinstance(part, Selected) else {n: p.to_node() for n, p in part.items()}
        return nodes


def selected_in(parts: object) -> Iterator[Selected]:
    """Yield the components in a mapping or sequence, and those in the options of each of them."""
    if isinstance(parts, Selected):
        yield parts
        yield from selected_in(vars(parts.config))
    elif isinstance(parts, Mapping | tuple | list):
        for part in parts.values() if isinstance(parts, Mapping) else parts:
            yield from selected_in(part)
