"""Where a model comes from, a file each: the hub, a folder, safetensors headers, GGUF files.
`memfit.model.source` chooses."""
