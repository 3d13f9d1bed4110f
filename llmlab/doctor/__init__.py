"""`python -m llmlab.doctor`: what this machine has, what that allows, what is missing."""
