"""Lists what can be chosen, and what cannot be and why."""
