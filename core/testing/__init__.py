"""Contract suites that plugin authors subclass. Needs the `test` extra (pytest, hypothesis)."""
