"""The app `replay`."""
