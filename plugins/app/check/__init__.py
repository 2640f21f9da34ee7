"""The app `check`."""
