"""The target model, which a draft learns from and is verified by."""
