"""Serving: an OpenAI-style HTTP API over an engine, and the chat page."""
