"""Package suite for Dovetail's own package."""

from __future__ import annotations

from dovetail.core.testing.package import PackageContract


class TestDovetail(PackageContract):
    package = "dovetail"
    # Other tests load every class and compose every preset and variant.
    test_classes_are_complete = None
    test_presets_and_variants_compose = None
