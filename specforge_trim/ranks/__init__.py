"""Several processes: the world, groups of ranks, gradients over them."""
