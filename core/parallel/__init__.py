"""Ranks as processes: how they are started and watched, and the channels between them."""
