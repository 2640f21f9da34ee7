"""Contract suites of Dovetail over the installed package; `dovetail app=check` runs them without pytest's command."""

from dovetail.core.testing.package import PackageContract
from dovetail.core.testing.suites import suite_of


class TestPackage(PackageContract):
    package = "dovetail-mine"


class TestMine(suite_of("KIND", "mine")):
    pass
