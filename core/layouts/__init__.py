"""How published checkpoints pack the codes of integer weights into int32 words, in torch and in both directions."""
