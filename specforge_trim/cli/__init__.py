"""Commands: settings in, one run of the phases, what a person reads out."""
