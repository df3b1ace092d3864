"""Which rows are computed: integers only, on the CPU, no model."""
