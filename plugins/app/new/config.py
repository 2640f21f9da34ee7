"""Options of the app `new`."""

from __future__ import annotations

from dovetail.core.compose import AppConfig


class NewConfig(AppConfig):
    """Write a package with one component, as a start for your own: it installs, passes app=check and runs as it is."""

    component: str
    """Kind and name of the component, such as scheduler/mine."""
    package: str | None = None
    """Name of the package, as in pip; null: dovetail-<name>."""
    folder: str | None = None
    """Folder to write to, which must be empty or not exist; null: the package's name, in the working directory."""
