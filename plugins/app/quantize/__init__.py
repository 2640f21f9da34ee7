"""The app `quantize`."""
