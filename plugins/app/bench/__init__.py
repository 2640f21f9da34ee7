"""The app `bench`."""
