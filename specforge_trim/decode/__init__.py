"""Speculative decoding, greedy and sampled, and what it measures."""
