"""The draft model, under the tensor names that serving engines load."""
