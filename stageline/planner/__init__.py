"""What a run will cost: seconds, memory, and where the layers are best placed."""
