"""How published checkpoints pack codes into int32 words, in torch and in both directions."""
