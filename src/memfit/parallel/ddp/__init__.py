"""DistributedDataParallel: replicas whose gradients are averaged in buckets."""
