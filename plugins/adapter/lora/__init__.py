"""Low-rank adapters in PEFT's layout."""
