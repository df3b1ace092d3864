"""Dense language models as drafts, trained on the rows that a loss reads."""
