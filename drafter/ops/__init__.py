"""The algorithms: one folder each, with the plain oracle beside the kernels that are held to it."""
