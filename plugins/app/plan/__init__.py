"""The app `plan`."""
