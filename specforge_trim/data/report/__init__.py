"""What prepared data look like under a configuration, for a terminal or as a page."""
