"""The engine of Stageline. It takes objects, never register keys, and imports nothing above it."""
