"""What a header says about each kind of layer: a record and its reader, in one file per kind.

`models.layers` computes each kind in a file of the same name.
"""
