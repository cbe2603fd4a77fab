"""FSDP of the second version (`fully_shard`), and the checks of both versions."""
