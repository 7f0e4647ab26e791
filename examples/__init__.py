"""Jobs as YAML files, and studies whose parts come by --import."""
