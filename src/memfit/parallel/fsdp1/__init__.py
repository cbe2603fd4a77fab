"""FSDP of the first version: flat parameters, sharded and gathered."""
