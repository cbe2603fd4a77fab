"""One process over several GPUs, some layers on each (`device_map`)."""
