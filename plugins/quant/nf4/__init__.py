"""4-bit weights of bitsandbytes: quantiles of the normal distribution."""
