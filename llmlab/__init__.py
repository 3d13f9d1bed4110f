"""llmlab: an LLM inference engine written from scratch, and the bench that measures it."""

__version__ = "0.1.0"
