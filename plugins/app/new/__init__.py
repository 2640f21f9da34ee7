"""The app `new`."""
