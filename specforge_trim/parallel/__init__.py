"""Many ranks: groups and their collectives, how ranks are laid out, gradients over ranks."""
