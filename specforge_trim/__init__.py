"""Train EAGLE-3 draft models on the rows that can reach a loss, with the full computation's result."""
