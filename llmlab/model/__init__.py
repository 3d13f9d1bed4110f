"""Models of the Llama family: config, checkpoint, one forward pass, tokenizer."""
