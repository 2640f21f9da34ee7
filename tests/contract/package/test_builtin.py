"""What a package promises, over Dovetail's own."""

from __future__ import annotations

from dovetail.core.testing.package import PackageContract


class TestDovetail(PackageContract):
    package = "dovetail"
    # Every class is loaded, and every preset and variant composed, by other tests.
    test_classes_are_complete = None
    test_presets_and_variants_compose = None
