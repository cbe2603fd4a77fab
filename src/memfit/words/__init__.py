"""From words to things: options as they are written, names of models and GPUs, job files."""
