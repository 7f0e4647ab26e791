"""Processes: starting them, their groups and mesh, seeds, and how a run ends when one fails."""
