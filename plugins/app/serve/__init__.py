"""The app `serve`: an OpenAI-compatible server."""
