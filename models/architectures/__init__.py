"""The known architectures, a file for each family; models.registry has them by name."""
