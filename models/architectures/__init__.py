"""The supported architectures, one file per family; models.registry indexes them by name."""
