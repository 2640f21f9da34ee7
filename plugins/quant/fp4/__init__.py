"""4-bit floats (E2M1) for weights, with a scale for each block of inputs."""
