"""Attention kernels: each a forward/backward pair that also returns the log-sum-exp."""
