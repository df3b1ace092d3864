"""Attention kernels: each file holds one forward/backward pair that also gives the log-sum-exp.

`attention.kernel.Kernel` is what they share; none imports another.
"""
