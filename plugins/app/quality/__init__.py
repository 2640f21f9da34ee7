"""The app `quality`."""
