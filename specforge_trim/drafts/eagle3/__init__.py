"""EAGLE-3 and EAGLE-3.1 drafts, trained on the rows that reach a loss."""
