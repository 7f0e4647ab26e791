"""The server: OpenAI's chat and completions over HTTP, in front of the decoding engine."""
