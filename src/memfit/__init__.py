"""memfit: what a model will need on a GPU, byte by byte, before any GPU is touched."""
