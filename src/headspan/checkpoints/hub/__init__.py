"""Models on the Hugging Face hub, read whole or by byte ranges."""
