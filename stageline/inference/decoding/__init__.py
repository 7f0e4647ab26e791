"""Pipelined decoding: many requests at once over a chain of stages, each answered by itself."""
