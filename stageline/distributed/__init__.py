"""Processes: their start, groups and mesh, what they print, and how a run ends when one fails."""
