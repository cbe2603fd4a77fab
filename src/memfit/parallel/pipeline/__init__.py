"""Pipeline parallelism: each rank has some of the layers."""
