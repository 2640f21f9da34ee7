"""Block-quantized weights of GGUF files."""
