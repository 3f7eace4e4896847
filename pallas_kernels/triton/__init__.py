"""The attention kernels for GPUs that are not Hopper, in Triton, called through `jax-triton`.

The same interfaces as the Hopper kernels beside this package. Nothing here has run on a GPU. Needs
`jax-triton` and `triton`, which the extras `cuda12` and `cuda13` bring.
"""
