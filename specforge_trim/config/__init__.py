"""Settings: sections that every run has, checks of their pairs, one YAML file, flags."""
