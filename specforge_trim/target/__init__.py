"""The target model: features, head, answers."""
