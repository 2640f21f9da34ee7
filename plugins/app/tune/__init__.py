"""The app `tune`."""
