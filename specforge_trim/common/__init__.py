"""What every folder may use: files written whole, tables."""
