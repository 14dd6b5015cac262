"""Models: configs, weights and decoders in Hugging Face format."""
