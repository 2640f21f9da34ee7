"""The app `ablate`."""
