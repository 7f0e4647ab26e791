"""Several copies of a pipeline behind one server: their links, and who gets which request."""
