"""One file per decoder architecture, named after `general.architecture`; models.registry lists them."""
