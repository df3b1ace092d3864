"""From conversations to token documents and stored target features."""
