"""From files to samples: rows of any common format, each with its place for error messages."""
