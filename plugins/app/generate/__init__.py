"""The app `generate`."""
