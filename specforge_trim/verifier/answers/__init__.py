"""The target's own answers to conversations, written by it here or behind a server."""
