"""Context parallelism: each rank has a part of every sequence."""
