"""Integer weights of 4 or 8 bits in groups, multiplied in the model's dtype or in FP8."""
