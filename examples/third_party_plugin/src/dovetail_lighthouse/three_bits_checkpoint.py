"""Recognition of checkpoints for quant=auto. Imports no torch."""


def reads(hf):
    stored = hf.get("quantization_config")
    return isinstance(stored, dict) and stored.get("quant_method") == "lighthouse"
