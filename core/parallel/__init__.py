"""Ranks as processes: starting and watching them, the channels between them, and the encoding of plans."""
