"""The app `plugins`."""
