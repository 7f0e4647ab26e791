"""Jobs as YAML files, and studies whose components are loaded with --import."""
