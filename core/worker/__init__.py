"""One rank: what every rank does with a plan, device included."""
