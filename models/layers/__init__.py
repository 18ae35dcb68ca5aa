"""Records the operations of each kind of layer, in one file per kind; `models.sizes` reads its sizes."""
