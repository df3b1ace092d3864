"""The loss end: teacher, head and soft cross-entropy in chunks."""
