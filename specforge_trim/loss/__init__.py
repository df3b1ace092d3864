"""Losses over a head that is never held whole, and the distributions they compare with."""
