"""`radixrt serve`: OpenAI's endpoints over one Runtime."""
