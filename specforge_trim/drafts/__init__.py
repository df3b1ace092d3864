"""Kinds of drafts: a folder each, behind one interface."""
